"use strict";
(() => {
  const { byId, count } = live;
  const { color } = charting;
  const MOST = 8;
  const chart = byId("compare-chart"), form = byId("form");
  const TITLES = { ratio: "angle ÷ equilibrium", angle: "angle per step, rad", norm: "norm of the weights" };
  const chosen = new Set(new URLSearchParams(location.search).getAll("run").map(Number));
  let wantedLayer = new URLSearchParams(location.search).get("layer");
  let comparison = null, shownRuns = "";

  const whole = [0, 1]; // the steps of all runs; changed in place, so that a zoom back shows them all
  const charts = [chart];
  const panels = charting.metricPanels(byId("metric-charts"), charts, whole); // which adds its charts
  const MOST_PANELS = 4;

  const kind = () => form.elements.kind.value;
  const runColor = (place) => color("c" + place);

  const line = (run, y, place, more, name) => ({
    x: run.x, y, mode: run.x.length > 1 ? "lines" : "markers", connectgaps: false, name: run.name,
    hovertemplate: "%{y:.3~g}" + (name ? " " + name : "") + "<extra>" + run.name.replace(/[<&]/g, " ") + "</extra>", meta: { run: run.id, kind: name || "measured" },
    line: { color: runColor(place), width: 2, ...more },
  });

  const range = (traces, least) => {
    const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null && value > 0);
    if (!values.length) return [0.1, 10];
    const low = Math.min(...values), high = Math.max(...values), room = Math.max(1.12, Math.sqrt((least * low) / high));
    return [low / room, high * room];
  };

  const draw = () => {
    if (!comparison) return;
    const drawn = comparison.runs.filter((run) => run.x.length);
    const measured = drawn.map((run, place) => line(run, run[kind()], place, { dash: "solid" }));
    const equilibriumLines = kind() === "angle" ? drawn.map((run, place) => line(run, run.angle_equilibrium, place, { width: 1.5, dash: "3px,3px" }, "equilibrium")) : [];
    const one = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: color("equilibrium-band"), width: 4 }, layer: "below" };
    const traces = [...equilibriumLines, ...measured];
    const ends = range(traces, kind() === "ratio" ? 2 : 4);
    const zoomed = chart.layout && chart.layout.xaxis.range.some((end, at) => end !== whole[at]);
    const steps = [...drawn, ...comparison.runs.flatMap((run) => run.metrics)].flatMap(({ x }) => (x.length ? [x[0], x.at(-1)] : []));
    whole.splice(0, 2, ...(steps.length ? [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)] : [0, 1]));
    const across = zoomed ? [...chart.layout.xaxis.range] : [...whole];
    const shapes = kind() === "ratio" ? { shapes: [one] } : {};
    const look = charting.look(charting.size(chart), { across, unit: "step", range: kind() === "ratio" ? [Math.min(ends[0], 0.8), Math.max(ends[1], 1.25)] : ends, title: TITLES[kind()], more: shapes });
    const isFirst = !chart.layout;
    charting.draw(chart, traces, look);
    if (isFirst) charting.linkZoom(charts, whole, [chart]);
    drawMetrics(across);
    byId("legend").replaceChildren(...drawn.map((run, place) => key(run.name, place)));
    byId("caption").textContent = caption(drawn);
    table(drawn);
  };

  // A run has one colour in all charts.
  const drawMetrics = (across) => {
    const drawn = comparison.runs.filter((run) => run.x.length);
    const names = [...new Set(drawn.flatMap((run) => run.metrics.map(({ name }) => name)))].slice(0, MOST_PANELS);
    const metrics = names.map((name) => {
      const own = drawn.map((run) => run.metrics.find((metric) => metric.name === name));
      const lines = own.flatMap((metric, place) => (metric ? [{ x: metric.x, y: metric.y, color: runColor(place),
        text: "%{y:.4~g}<br>" + drawn[place].name.replace(/[<&]/g, " ") + ", step %{x:,.0f}" }] : []));
      return { name, note: "", log: own.some((metric) => metric && metric.log) && lines.every(({ y }) => y.every((value) => value === null || value > 0)), lines };
    });
    byId("metrics").hidden = metrics.length === 0;
    panels(metrics, "step", across);
  };

  const caption = (drawn) => {
    if (!comparison.runs.length) return "Choose one run or more above.";
    const without = comparison.runs.filter((run) => !run.x.length && !run.message).map((run) => run.name);
    const unreadable = comparison.runs.filter((run) => run.message).map((run) => " " + run.name + " is " + run.message + ".").join("");
    const lines = { ratio: "Root mean square of the measured angle over that of the equilibrium angle of lr × wd; 1 means equilibrium.",
      angle: "Root mean square of the measured angle; dotted: the equilibrium of lr × wd.", norm: "Norm of the weights before each step." };
    return (drawn.length ? lines[kind()] : "") + (without.length ? " Runs without this layer: " + without.join(", ") + "." : "") + unreadable;
  };

  const key = (name, place) => {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = runColor(place);
    item.append(swatch, name);
    return item;
  };

  const table = (drawn) => byId("last").replaceChildren(...drawn.map((run) => {
    const row = document.createElement("tr"), name = document.createElement("th");
    name.scope = "row";
    name.textContent = run.name;
    row.append(name);
    const measured = run.angle.findLastIndex((value) => value !== null); // all values of a row are of one step
    const last = measured < 0 ? run.x.length - 1 : measured;
    const shown = (value) => value === null ? "–" : String(Number(value.toPrecision(3)));
    for (const words of [count(Math.round(run.x[last])), ...["angle", "angle_predicted", "angle_equilibrium", "ratio", "norm"].map((kind) => shown(run[kind][last]))]) {
      const cell = document.createElement("td");
      cell.textContent = words;
      row.append(cell);
    }
    return row;
  }));

  // Two runs can be explained: A is the one that the server lists first.
  let explained = "";
  const offerWhy = () => {
    const runs = comparison.runs.filter((run) => run.x.length);
    byId("why").hidden = runs.length !== 2;
    if (runs.length !== 2) return;
    const now = runs.map((run) => run.id).join(" ");
    if (now !== explained) byId("explanation").replaceChildren();
    byId("why-runs").textContent = "A is " + runs[0].name + ", B is " + runs[1].name + ".";
  };
  byId("explain").addEventListener("click", live.oneAtATime(async () => {
    const runs = comparison.runs.filter((run) => run.x.length), query = new URLSearchParams(runs.map((run) => ["run", run.id]));
    byId("why-runs").textContent = "Switching the causes one by one …";
    try {
      const { headline, inside } = await live.get("/compare/explain/view?" + query);
      explained = runs.map((run) => run.id).join(" ");
      byId("explanation").innerHTML = inside;
      const first = document.createElement("p"), strong = document.createElement("strong");
      strong.textContent = headline + ".";
      first.append(strong);
      byId("explanation").prepend(first);
    } catch (error) { live.showProblem(error.message); }
    offerWhy();
  }));

  const layers = () => {
    const select = byId("layer");
    const now = [...select.options].map((option) => option.value).join("\n");
    if (now !== comparison.layers.join("\n")) select.replaceChildren(...comparison.layers.map((name) => new Option(name, name)));
    if (comparison.layer !== null) select.value = comparison.layer;
  };

  const refresh = live.oneAtATime(async () => {
    const query = new URLSearchParams([...chosen].map((number) => ["run", number]));
    if (wantedLayer) query.set("layer", wantedLayer);
    try {
      comparison = await live.get("/compare/view?" + query);
      live.showProblem("");
    } catch (error) {
      if (wantedLayer) { wantedLayer = null; refresh(); return; } // none of these runs has that layer
      live.showProblem(error.message);
      return;
    }
    history.replaceState(null, "", "?" + query);
    if (wantedLayer === null) { // the server chose it: keep it while the runs train
      wantedLayer = comparison.layer;
      if (!comparison.runs.some((run) => (run.ratio || []).some((value) => value !== null))) form.elements.kind.value = "angle";
    }
    layers();
    offerWhy();
    await live.loadCharts();
    draw();
    document.documentElement.dataset.drawn = comparison.runs.map((run) => run.id + ":" + (run.x.at(-1) || 0)).join(" ");
  });

  const picks = (runs) => {
    const place = byId("picks");
    for (const run of runs) {
      if (place.querySelector('[value="' + run.id + '"]') || live.stateKind(run.state) === "damaged") continue;
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.name = "run";
      box.value = run.id;
      box.checked = chosen.has(run.id);
      label.append(box, run.name);
      place.append(label);
    }
  };
  const markGone = (runs) => {
    const present = new Set(runs.map((run) => String(run.id)));
    for (const label of byId("picks").children) label.classList.toggle("gone", !present.has(label.querySelector("input").value));
  };
  const update = ({ runs }) => {
    const first = byId("picks").children.length === 0;
    if (first && chosen.size === 0) runs.filter((run) => live.stateKind(run.state) !== "damaged").slice(0, 3).forEach((run) => chosen.add(run.id));
    picks(runs);
    markGone(runs);
    live.setStatus(runs.length ? chosen.size + " of " + runs.length + " runs chosen" : "No runs yet");
    const now = JSON.stringify(runs.filter((run) => chosen.has(run.id)).map((run) => [run.id, run.samples, run.updated]));
    if (now !== shownRuns || first) { shownRuns = now; refresh(); }
  };

  form.addEventListener("change", (event) => {
    if (event.target.name === "run") {
      const number = Number(event.target.value);
      if (event.target.checked && chosen.size >= MOST) { event.target.checked = false; live.showProblem("Choose at most " + MOST + " runs."); return; }
      if (event.target.checked) chosen.add(number); else chosen.delete(number);
      refresh();
    } else if (event.target.name === "layer") { wantedLayer = event.target.value; refresh(); } else draw();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  live.listen("/events", "runs", update);
  charting.keepDrawn(charts, draw);
})();
