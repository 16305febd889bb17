"use strict";
(() => {
  const { byId, count, ago, kind } = live;
  const number = byId("page").dataset.number;
  let update = null, shown = null, held = false, status = null;

  const refresh = live.oneAtATime(async () => {
    if (shown !== null && status && status.view === shown) return; // asked for while it was on its way
    const view = await live.get("/run/" + number + "/view");
    if (view.view === shown) return;
    shown = view.view;
    if (view.damaged) { showDamage(view.damaged); return; }
    live.show(view.inside);
    performance.mark("words");
    await live.charts();
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

  const tell = () => {
    if (!status) return;
    live.say(status.state + (held ? ", held still" : ""), kind(status.state));
    const when = status.updated === null ? "" : ", written " + ago(status.updated);
    byId("progress").textContent = status.steps === null ? "" : "· step " + count(status.steps - 1) + ", " + count(status.samples) + " samples" + when;
  };

  byId("pause").addEventListener("click", () => {
    held = !held;
    byId("pause").setAttribute("aria-pressed", held);
    tell();
    if (!held) refresh().catch(failed);
  });

  const failed = (error) => live.say("Cannot be shown: " + error.message, "interrupted");
  refresh().catch(failed);
  live.listen("/run/" + number + "/events", "status", (now) => {
    status = now;
    tell();
    if (now.view !== null && now.view !== shown && !held) refresh().catch(failed);
  });
  setInterval(tell, 5000);
})();
