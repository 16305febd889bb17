"use strict";
(() => {
  const { byId, count } = live;
  const form = byId("form"), number = form.dataset.number;
  let update = null;

  const refresh = live.oneAtATime(async () => {
    const query = live.formQuery(form);
    live.setStatus(query.has("suggest") ? "Searching among some hundred plans …" : "Computing …");
    try {
      const view = await live.get("/run/" + number + "/forecast/view?" + query);
      live.showProblem("");
      live.showPage(view.inside);
      await live.loadCharts();
      if (update) update(view.data); else update = drawForecast(view.data);
      byId("page").classList.remove("stale");
      live.setStatus("Up to date");
      history.replaceState(null, "", "?" + query);
    } catch (error) {
      live.showProblem(error.message);
      live.setStatus("Not computed");
      byId("page").classList.add("stale");
    }
    document.documentElement.dataset.query = query;
  });

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

  const soon = live.debounce(refresh, 250);
  form.addEventListener("input", () => { live.hideUnneeded(form); soon(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); refresh(); });
  live.linkSliders(form);
  live.hideUnneeded(form);
  begin().catch((error) => live.showProblem(error.message));
})();
