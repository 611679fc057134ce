// Load of the experts: all layers at one step, and one layer over all steps.
const expertsState = { run: null, load: null };

const heatLayout = (x, y) => figureLayout({ margin: { l: 55, r: 10, t: 8, b: 40 }, xaxis: { title: { text: x }, type: "category", nticks: 20 }, yaxis: { title: { text: y }, type: "category", nticks: 16 } });

function heatTrace(z, x, y, hover) {
  const most = Math.max(2, Math.min(8, expertsState.most));
  return { type: "heatmap", z, x, y, zmin: 0, zmax: most, colorscale: [[0, "#1d4ed8"], [1 / most, isDark() ? "#1e293b" : "#f8fafc"], [1, "#dc2626"]],
    colorbar: { thickness: 10, title: { text: "of the mean", font: { size: 10 } } }, hovertemplate: hover + ": %{z:.3f} of the mean<extra></extra>" };
}

const loadRow = (values, layer) => Array.from(values.subarray(layer * expertsState.load.experts, (layer + 1) * expertsState.load.experts), (value) => (Number.isNaN(value) ? null : value));

function drawExperts() {
  const { load, values } = expertsState;
  if (!load) return;
  const place = Number(byId("expert-step").value), layer = Number(byId("expert-layer").value);
  const experts = Array.from({ length: load.experts }, (_, number) => number);
  byId("expert-step-value").textContent = "step " + load.steps[place];
  Plotly.react(byId("expert-layers"), [heatTrace(load.layers.map((_, row) => loadRow(values[place], row)), experts, load.layers, "layer %{y}, expert %{x}")], heatLayout("expert", "layer"), FIGURE);
  Plotly.react(byId("expert-steps"), [heatTrace(experts.map((expert) => values.map((one) => loadRow(one, layer)[expert])), load.steps, experts, "step %{x}, expert %{y}")], heatLayout("step", "expert"), FIGURE);
}

async function readExperts() {
  const slider = byId("expert-step"), run = Number(byId("expert-run").value);
  const load = await unpacked("e" + run);
  if (!load) return;
  const isSame = expertsState.run === run, values = load.loads.map(quantityValues);
  // The step that the reader has chosen stays; one who looks at the newest goes on to the newest.
  const chosen = isSame && Number(slider.value) < expertsState.load.steps.length - 1 ? load.steps.indexOf(expertsState.load.steps[Number(slider.value)]) : -1;
  Object.assign(expertsState, { run, load, values, most: Math.max(...load.loads.map((one) => one.high)) });
  slider.max = load.steps.length - 1;
  slider.value = chosen < 0 ? load.steps.length - 1 : chosen;
  fillSelect(byId("expert-layer"), load.layers.map((layer, place) => [place, "layer " + layer]));
  drawExperts();
}

function updateExperts() {
  fillSelect(byId("expert-run"), DATA.expert_runs.map((run) => [run, visible(RUNS[run].name)]));
  byId("expert-run").parentElement.hidden = DATA.expert_runs.length < 2;
  return readExperts();
}

function startExperts() {
  updateExperts();
  byId("expert-run").addEventListener("change", readExperts);
  byId("expert-step").addEventListener("input", drawExperts);
  byId("expert-layer").addEventListener("change", drawExperts);
  repaints.push(drawExperts);
}
