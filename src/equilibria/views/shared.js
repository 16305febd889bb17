"use strict";
// What the charts of every page have in common; the script of the page itself follows.
const charting = (() => {
  const root = document.documentElement;
  const touch = window.matchMedia("(hover: none), (pointer: coarse)").matches;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // The densest of a few familiar sets of marks that leaves room between them.
  const axisTicks = (low, high, most) => {
    if (high / low < 3.5) return evenTicks(low, high);
    const sets = [[1, 2, 5], [1, 3], [1]].map((digits) => {
      const values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        for (const digit of digits) values.push(Number(digit + "e" + power));
      }
      return values.filter((value) => value >= low && value <= high);
    });
    const sparse = sets[2].filter((_, index) => index % Math.ceil(sets[2].length / most) === 0);
    const ticks = sets.find((values) => values.length <= most) || sparse;
    return ticks.length < 3 ? evenTicks(low, high) : ticks;
  };

  const evenTicks = (low, high) => {
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((digit) => digit * power >= rough) * power;
    const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
    return Array.from({ length: count }, (_, i) => Number(((Math.ceil(low / step) + i) * step).toPrecision(6)));
  };

  const tickText = (value) => (value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e5) ? String(value) : value.toExponential().replace("e+", "e"));

  // One closed outline per stretch without holes: plotly's own fill between two lines joins across holes.
  const area = (along, upper, lower, fillcolor) => {
    const x = [], y = [];
    const close = (from, to) => {
      for (let i = from; i < to; i++) { x.push(along[i]); y.push(upper[i]); }
      for (let i = to - 1; i >= from; i--) { x.push(along[i]); y.push(lower[i]); }
      x.push(null); y.push(null);
    };
    const known = (value) => value !== null && !Number.isNaN(value);
    let from = null;
    for (let i = 0; i <= along.length; i++) {
      const whole = i < along.length && known(upper[i]) && known(lower[i]);
      if (whole && from === null) from = i;
      if (!whole && from !== null) { close(from, i); from = null; }
    }
    return { x, y, mode: "lines", line: { width: 0 }, fill: "toself", fillcolor, hoverinfo: "skip" };
  };

  // A log axis upwards, unless it is linear; along it, steps or epochs.
  const look = ([width, height], { across, unit, range, title, linear, more }) => {
    const ticks = linear ? evenTicks(range[0], range[1]) : axisTicks(range[0], range[1], Math.max(4, height / 38));
    const narrow = width < 500;
    const family = getComputedStyle(document.body).fontFamily;
    return {
      width, height, autosize: false, margin: { l: narrow ? 54 : 76, r: 14, t: 22, b: 42 }, showlegend: false, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: touch ? false : "zoom",
      font: { family, size: 13, color: color("soft") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { family, color: color("ink"), size: 13 } },
      xaxis: { range: across, title: { text: unit, standoff: 6 }, showgrid: false, zeroline: false,
        linecolor: color("line"), showline: true, ticks: "outside", tickcolor: color("line"), nticks: narrow ? 5 : 10,
        unifiedhovertitle: { text: unit + (unit === "epoch" ? " %{x:.4~g}" : " %{x:,d}") },
        fixedrange: touch },
      yaxis: { type: linear ? "linear" : "log", range: linear ? range : range.map(Math.log10), title: { text: narrow ? "" : title, standoff: 10 }, tickvals: ticks,
        ticktext: ticks.map(tickText), gridcolor: color("line"), griddash: "dot", zeroline: false, fixedrange: true },
      modebar: { bgcolor: color("paper"), color: color("naive"), activecolor: color("ink") },
      ...more,
    };
  };

  const size = (chart) => [chart.clientWidth, chart.clientHeight];

  const draw = (chart, traces, layout) => Plotly.react(chart, traces, layout, {
    displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], displayModeBar: touch ? false : "hover",
  });

  // Zoom in one chart shows the same stretch in the others; charts may be added later.
  const linkZoom = (charts, all, added = charts) => added.forEach((chart) => chart.on("plotly_relayout", (change) => {
    const reset = change["xaxis.autorange"];
    if (!reset && !("xaxis.range[0]" in change)) return;
    const range = reset ? [...all] : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    for (const other of charts) {
      const now = other.layout.xaxis.range;
      if (now[0] !== range[0] || now[1] !== range[1]) Plotly.relayout(other, { "xaxis.range": range });
    }
  }));

  // One small chart for each number that the training logged, over the same steps as the other charts, which are given.
  // A metric has a name, a note, whether its axis is logarithmic, and lines: x, y, color and the text of the hover.
  const metricPanels = (place, charts, all) => {
    const panels = new Map();
    const made = (name) => {
      const [box, title, note, chart] = ["figure", "figcaption", "small", "div"].map((kind) => document.createElement(kind));
      box.className = "panel";
      chart.className = "chart";
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", "Chart of " + name + " over the run");
      title.append(name, note);
      box.append(title, chart);
      return { box, note, chart };
    };
    const extent = (lines, log) => {
      let low = Infinity, high = -Infinity;
      for (const { y } of lines) for (const value of y) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
      if (low > high) return log ? [0.1, 10] : [0, 1];
      if (log) return [low / 1.15, high * 1.15];
      const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
      return [low - room, high + room];
    };
    return (metrics, unit, across) => {
      for (const [name, { box, chart }] of panels) {
        if (metrics.some((metric) => metric.name === name)) continue;
        box.remove();
        charts.splice(charts.indexOf(chart), 1);
        panels.delete(name);
      }
      metrics.forEach(({ name }, index) => { // all of them first: the last one is higher
        if (!panels.has(name)) panels.set(name, made(name));
        const { box } = panels.get(name);
        if (place.children[index] !== box) place.insertBefore(box, place.children[index] || null);
      });
      metrics.forEach(({ name, note, log, lines }, index) => {
        const panel = panels.get(name);
        panel.note.textContent = note;
        const traces = lines.map(({ x, y, color, text }) => ({ x, y, connectgaps: false, line: { color, width: 1.2 }, marker: { color, size: 4 },
          mode: x.length > 60 ? "lines" : "lines+markers", hovertemplate: text + "<extra></extra>", meta: { metric: name } }));
        const shape = look(size(panel.chart), { across: [...across], unit, range: extent(lines, log), title: "", linear: !log,
          more: { hovermode: "closest", hoverdistance: 30 } });
        shape.margin = { ...shape.margin, t: 8, b: index === metrics.length - 1 ? 42 : 24 };
        if (index < metrics.length - 1) shape.xaxis.title = { text: "" }; // one for all panels
        draw(panel.chart, traces, shape);
        if (!charts.includes(panel.chart)) { charts.push(panel.chart); linkZoom(charts, all, [panel.chart]); }
      });
    };
  };

  // The alternative that is chosen, and what to do when another one is.
  const chosen = () => Number((document.querySelector("input[name=choice]:checked") || { value: 0 }).value);
  const onChoice = (act) => document.addEventListener("change", (event) => {
    if (event.target.name === "choice") act();
  });

  // Draw again for another colour scheme or width, and on paper.
  const keepDrawn = (charts, drawAll) => {
    const print = (on) => {
      root.classList.toggle("printing", on);
      for (const chart of charts) chart.style.width = on ? "660px" : "";
      drawAll();
    };
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      // Phones fire "resize" when the address bar hides; only a new width changes the charts.
      if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); }
    });
    window.addEventListener("beforeprint", () => print(true));
    window.addEventListener("afterprint", () => print(false));
  };

  // A self-contained page holds its data; a live page fetches them.
  const whenComplete = (draw) => {
    const data = document.getElementById("page-data");
    if (data) draw(JSON.parse(data.textContent));
  };

  return { whenComplete, color, touch, area, look, size, draw, linkZoom, metricPanels, keepDrawn, chosen, onChoice };
})();
