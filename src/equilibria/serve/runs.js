"use strict";
(() => {
  const { byId, count, ago, stateKind } = live;
  let runs = [];

  const cell = (tag, ...inside) => { const node = document.createElement(tag); node.append(...inside); return node; };
  const small = (words) => cell("small", words);

  const finding = (run) => {
    if (run.message) return [run.message];
    if (run.headline === null) return [cell("span", "reading …")];
    const parts = [run.headline];
    if (run.worst) {
      const badge = cell("span", (run.severity === "warning" ? "⚠\ufe0e " : "ℹ\ufe0e ") + run.severity);
      badge.className = "badge";
      const line = cell("small", badge, run.worst);
      if (run.severity === "warning") line.className = "warning";
      parts.push(line);
    }
    return parts;
  };

  const row = (run) => {
    const line = document.createElement("tr");
    const link = cell("a", run.name);
    link.href = "/run/" + run.id;
    const name = cell("th", link);
    name.scope = "row";
    const state = cell("td", run.state);
    state.className = "state-" + stateKind(run.state);
    const updated = cell("td", run.updated === null ? "–" : ago(run.updated));
    updated.className = "wide";
    const steps = run.steps === null ? ["–"] : [count(run.steps), small(count(run.samples) + " samples")];
    line.append(name, state, cell("td", ...steps), updated, cell("td", ...finding(run)));
    return line;
  };

  const draw = () => {
    const rows = runs.map(row);
    const body = byId("runs");
    rows.forEach((line, place) => {
      const old = body.children[place];
      if (!old) body.append(line);
      else if (!old.isEqualNode(line)) {
        const focused = old.contains(document.activeElement);
        old.replaceWith(line);
        if (focused) line.querySelector("a").focus();
      }
    });
    while (body.children.length > rows.length) body.lastChild.remove();
  };

  const show = ({ runs: listed, empty, left_out: leftOut }) => {
    runs = listed;
    const training = runs.filter((run) => stateKind(run.state) === "training").length;
    const words = runs.length + (runs.length === 1 ? " run" : " runs") + (training ? ", " + training + " training now" : "");
    live.setStatus(runs.length ? words : "No runs yet", training ? "training" : "");
    byId("empty").textContent = empty.length
      ? "No run in " + empty.join(", ") + " yet. equilibria.watch(..., log_dir=...) writes one; it appears here by itself."
      : "";
    if (leftOut) byId("empty").textContent += " There are more runs; the list shows the first " + count(runs.length) + ".";
    draw();
  };

  live.get("/runs").then(show, () => live.setStatus("No answer from the server", "interrupted"));
  live.listen("/events", "runs", show);
  setInterval(draw, 5000); // keeps "2 seconds ago" up to date
})();
