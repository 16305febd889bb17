"use strict";
(() => {
  const { byId, count, ago, stateKind } = live;
  const number = byId("page").dataset.number;
  let update = null, shown = null, paused = false, status = null;

  const refresh = live.oneAtATime(async () => {
    if (shown !== null && status && status.view === shown) return; // requested while it was on its way
    const view = await live.get("/run/" + number + "/view");
    if (view.view === shown) return;
    shown = view.view;
    if (view.damaged) { showDamage(view.damaged); return; }
    live.showPage(view.inside);
    performance.mark("words");
    await live.loadCharts();
    if (update) update(view.data); else update = drawReport(view.data);
    performance.mark("charts");
    document.documentElement.dataset.view = shown;
  });

  const showDamage = (message) => {
    const page = byId("page"), title = document.createElement("h1"), words = document.createElement("p");
    title.textContent = "This run cannot be read";
    words.className = "notice problem";
    words.textContent = message;
    page.replaceChildren(title, words);
    update = null;
  };

  const showStatus = () => {
    if (!status) return;
    live.setStatus(status.state + (paused ? ", page paused" : ""), stateKind(status.state));
    const when = status.updated === null ? "" : ", written " + ago(status.updated);
    byId("progress").textContent = status.steps === null ? "" : "· step " + count(status.steps - 1) + ", " + count(status.samples) + " samples" + when;
  };

  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", paused);
    showStatus();
    if (!paused) refresh().catch(failed);
  });

  const failed = (error) => live.setStatus("Cannot show this run: " + error.message, "interrupted");
  refresh().catch(failed);
  live.listen("/run/" + number + "/events", "status", (now) => {
    status = now;
    showStatus();
    if (now.view !== null && now.view !== shown && !paused) refresh().catch(failed);
  });
  setInterval(showStatus, 5000);
})();
