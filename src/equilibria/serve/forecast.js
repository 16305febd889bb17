"use strict";
(() => {
  const { byId, count } = live;
  const form = byId("form"), number = form.dataset.number;
  const busy = (query) => (query.has("suggest") ? "Searching among some hundred plans …" : "Computing …");
  const refresh = live.formPage(form, { address: "/run/" + number + "/forecast/view", draw: drawForecast, wait: 250, busy });

  const round = (value) => Number(value.toPrecision(2));
  const begin = async () => {
    const { runs } = await live.get("/runs");
    const steps = (runs.find((run) => String(run.id) === number) || {}).steps || 0;
    byId("recorded").textContent = "Recorded until now: " + count(steps) + " steps.";
    const slider = form.querySelector('[data-slides="steps"]');
    slider.min = steps + 1;
    slider.max = Math.max(10 * steps, 1000);
    if (!byId("steps").value) byId("steps").value = Math.max(2 * round(steps), 100);
    if (!byId("milestones").value) byId("milestones").value = round(1.3 * steps);
    live.fillForm(form);
    refresh();
  };
  begin().catch((error) => live.showProblem(error.message));
})();
