// Draws the charts and returns a function that draws newer data into them, for the live page.
const drawForecast = (first) => {
  let data = first;
  const across = [0, data.end]; // changed in place: a zoom ends at the whole run, which may have grown
  const charts = ["angle-chart", "norm-chart", "elr-chart", "schedule-chart"].map((id) => document.getElementById(id));
  const chosenLayer = () => Math.min(Number(document.getElementById("layer").value), data.names.length - 1);
  const { color } = charting;

  const line = (x, y, name, style, unit) => ({
    x, y, name, mode: "lines", line: { simplify: false, ...style }, hovertemplate: "%{y:.3~g}" + unit, hoverinfo: "x+y+name",
  });

  const begins = () => ({ type: "line", xref: "x", yref: "paper", x0: data.first, x1: data.first, y0: 0, y1: 1,
    line: { color: color("soft"), width: 1, dash: "dot" }, layer: "below" });

  const label = (width) => ({ text: width < 500 ? "forecast →" : "forecast begins →", xref: "x", yref: "paper", x: data.first, y: 1,
    yanchor: "bottom", xanchor: data.first < data.end / 2 ? "left" : "right", showarrow: false,
    font: { size: 12, color: color("soft") } });

  const layout = (size, range, title) => charting.look(size, { across: [0, data.end], unit: data.unit, range, title,
    more: { shapes: [begins()], annotations: [label(size[0])] } });

  // Measured dots, the band and line of the chosen scenario, and the lines of the others behind.
  const traces = (kind, unit) => {
    const layerIndex = chosenLayer(), chosen = charting.chosen();
    const measured = data.measured[layerIndex];
    const lines = [{ x: measured.x, y: measured[kind], name: "measured", mode: "markers", hoverinfo: "x+y+name",
      hovertemplate: "%{y:.3~g}" + unit, marker: { color: color("naive"), size: 4, opacity: 0.7 } }];
    data.scenarios.forEach((scenario, other) => {
      const layer = scenario.layers[layerIndex];
      if (other !== chosen && layer[kind]) {
        lines.push({ ...line(scenario.schedules[layer.schedule].x, layer[kind], scenario.name,
          { color: color("predicted"), width: 1.5 }, unit), opacity: 0.55 });
      }
    });
    const scenario = data.scenarios[chosen], layer = scenario.layers[layerIndex];
    const x = scenario.schedules[layer.schedule].x;
    if (layer[kind + "_low"]) lines.unshift(charting.area(x, layer[kind + "_high"], layer[kind + "_low"], color("sure")));
    if (layer[kind]) lines.push(line(x, layer[kind], scenario.name, { color: color("predicted"), width: 4 }, unit));
    if (kind === "angle") {
      lines.push(line(x, layer.equilibrium, "equilibrium", { color: color("equilibrium"), width: 2, dash: "dash" }, unit));
    }
    return lines;
  };

  const chart = (kind, unit, title) => (size) => [
    traces(kind, unit), layout(size, data.ranges[chosenLayer()][kind], title),
  ];

  const scheduleChart = (size) => {
    const scenario = data.scenarios[charting.chosen()];
    const schedule = scenario.schedules[scenario.layers[chosenLayer()].schedule];
    return [[
      line(schedule.x, schedule.lr, "lr", { color: color("lr"), width: 2 }, ""),
      line(schedule.x, schedule.wd, "wd", { color: color("wd"), width: 2, dash: "dash" }, ""),
    ], layout(size, data.schedule_range, "lr, wd")];
  };

  const drawn = [
    chart("angle", " rad", "angle per step, rad"), chart("norm", "", "norm"), chart("elr", "", "lr ÷ norm²"), scheduleChart,
  ];
  const drawAll = () => drawn.forEach((chart, index) => {
    charting.draw(charts[index], ...chart(charting.size(charts[index])));
  });

  drawAll();
  charting.onChoice(drawAll);
  document.addEventListener("change", (event) => { if (event.target.id === "layer") drawAll(); });
  charting.linkZoom(charts, across);
  charting.keepDrawn(charts, drawAll);
  return (next) => { data = next; across[1] = next.end; drawAll(); };
};

charting.whenComplete(drawForecast);
