"use strict";
(() => {
  const { byId, count } = live;
  const { color } = charting;
  const MOST = 8;
  const chart = byId("compare-chart"), form = byId("form");
  const TITLES = { ratio: "angle ÷ equilibrium", angle: "angle per step, rad", norm: "norm of the weights" };
  const chosen = new Set(new URLSearchParams(location.search).getAll("run").map(Number));
  let wantedLayer = new URLSearchParams(location.search).get("layer");
  let found = null, seen = "";

  const kind = () => form.elements.kind.value;
  const hue = (place) => color("c" + place);

  const line = (run, y, place, more, name) => ({
    x: run.x, y, mode: run.x.length > 1 ? "lines" : "markers", connectgaps: false, name: run.name,
    hovertemplate: "%{y:.3~g}" + (name ? " " + name : "") + "<extra>" + run.name.replace(/[<&]/g, " ") + "</extra>", meta: { run: run.id, kind: name || "measured" },
    line: { color: hue(place), width: 2, ...more },
  });

  const range = (traces, least) => {
    const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null && value > 0);
    if (!values.length) return [0.1, 10];
    const low = Math.min(...values), high = Math.max(...values), room = Math.max(1.12, Math.sqrt((least * low) / high));
    return [low / room, high * room];
  };

  const draw = () => {
    if (!found) return;
    const drawn = found.runs.filter((run) => run.x.length);
    const measured = drawn.map((run, place) => line(run, run[kind()], place, { dash: "solid" }));
    const goals = kind() === "angle" ? drawn.map((run, place) => line(run, run.angle_equilibrium, place, { width: 1.5, dash: "3px,3px" }, "equilibrium")) : [];
    const one = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: color("equilibrium"), width: 4 }, layer: "below" };
    const traces = [...goals, ...measured];
    const ends = range(traces, kind() === "ratio" ? 2 : 4);
    const steps = drawn.flatMap((run) => run.x);
    const across = steps.length ? [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)] : [0, 1];
    const shapes = kind() === "ratio" ? { shapes: [one] } : {};
    const look = charting.look(charting.size(chart), { across, unit: "step", range: kind() === "ratio" ? [Math.min(ends[0], 0.8), Math.max(ends[1], 1.25)] : ends, title: TITLES[kind()], more: shapes });
    charting.draw(chart, traces, look);
    byId("legend").replaceChildren(...drawn.map((run, place) => key(run.name, place)));
    byId("caption").textContent = caption(drawn);
    table(drawn);
  };

  const caption = (drawn) => {
    if (!found.runs.length) return "Choose one run or more above.";
    const without = found.runs.filter((run) => !run.x.length && !run.message).map((run) => run.name);
    const told = found.runs.filter((run) => run.message).map((run) => " " + run.name + " is " + run.message + ".").join("");
    const lines = { ratio: "Root mean squares of the measured angle over that of equilibrium; 1 is what lr × wd asks for.",
      angle: "Measured, root mean square; dotted: the equilibrium of lr × wd.", norm: "Norm of the weights before the step." };
    return (drawn.length ? lines[kind()] : "") + (without.length ? " Without this layer: " + without.join(", ") + "." : "") + told;
  };

  const key = (name, place) => {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = hue(place);
    item.append(swatch, name);
    return item;
  };

  const table = (drawn) => byId("last").replaceChildren(...drawn.map((run) => {
    const row = document.createElement("tr"), name = document.createElement("th");
    name.scope = "row";
    name.textContent = run.name;
    row.append(name);
    const last = (values) => { const value = values.findLast((each) => each !== null); return value === undefined ? "–" : String(Number(value.toPrecision(3))); };
    for (const words of [count(Math.round(run.x.at(-1))), ...["angle", "angle_predicted", "angle_equilibrium", "ratio", "norm"].map((kind) => last(run[kind]))]) {
      const cell = document.createElement("td");
      cell.textContent = words;
      row.append(cell);
    }
    return row;
  }));

  const layers = () => {
    const select = byId("layer");
    const now = [...select.options].map((option) => option.value).join("\n");
    if (now !== found.layers.join("\n")) select.replaceChildren(...found.layers.map((name) => new Option(name, name)));
    if (found.layer !== null) select.value = found.layer;
  };

  const refresh = live.oneAtATime(async () => {
    const query = new URLSearchParams([...chosen].map((number) => ["run", number]));
    if (wantedLayer) query.set("layer", wantedLayer);
    try {
      found = await live.get("/compare/view?" + query);
      live.problem("");
    } catch (error) {
      if (wantedLayer) { wantedLayer = null; refresh(); return; } // a layer that none of these runs has
      live.problem(error.message);
      return;
    }
    history.replaceState(null, "", "?" + query);
    layers();
    await live.charts();
    draw();
    document.documentElement.dataset.drawn = found.runs.map((run) => run.id + ":" + (run.x.at(-1) || 0)).join(" ");
  });

  const picks = (runs) => {
    const place = byId("picks");
    for (const run of runs) {
      if (place.querySelector('[value="' + run.id + '"]') || kindOf(run) === "damaged") continue;
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
    const there = new Set(runs.map((run) => String(run.id)));
    for (const label of byId("picks").children) label.classList.toggle("gone", !there.has(label.querySelector("input").value));
  };
  const kindOf = (run) => live.kind(run.state);

  const arrived = ({ runs }) => {
    const first = byId("picks").children.length === 0;
    if (first && chosen.size === 0) runs.filter((run) => kindOf(run) !== "damaged").slice(0, 3).forEach((run) => chosen.add(run.id));
    picks(runs);
    markGone(runs);
    live.say(runs.length ? chosen.size + " of " + runs.length + " runs chosen" : "No runs yet");
    const now = JSON.stringify(runs.filter((run) => chosen.has(run.id)).map((run) => [run.id, run.samples, run.updated]));
    if (now !== seen || first) { seen = now; refresh(); }
  };

  form.addEventListener("change", (event) => {
    if (event.target.name === "run") {
      const number = Number(event.target.value);
      if (event.target.checked && chosen.size >= MOST) { event.target.checked = false; live.problem("At most " + MOST + " runs are compared at once."); return; }
      if (event.target.checked) chosen.add(number); else chosen.delete(number);
      refresh();
    } else if (event.target.name === "layer") { wantedLayer = event.target.value; refresh(); } else draw();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  live.listen("/events", "runs", arrived);
  charting.keepDrawn([chart], draw);
})();
