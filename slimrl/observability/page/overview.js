// State of the runs, what asks for a look, the recipe against its base, model, versions and hardware.
const STATE_CLASS = { starting: "warn", running: "warn", complete: "good", failed: "bad", preempted: "warn" };

// Metrics whose last values say most of a run.
const HEADLINES = [/^reward\/mean$/, /^sft\/loss$/, /^eval\/[^/]+\/(accuracy|reward_mean)$/, /^rollout\/zero_variance_fraction$/, /^policy\/entropy$/,
  /^mismatch\/logprob_abs_mean$/, /^policy\/grad_norm$/, /^time\/step_s$/];

const folds = new Map(); // name of what can be folded -> whether the reader has opened it
const shownKinds = new Map(); // name of a run -> kinds of settings that its table shows

function fold(name, open, attributes, summary, ...children) {
  return element("details", { ...attributes, open: folds.get(name) ?? open, toggle: (event) => folds.set(name, event.target.open) },
    element("summary", {}, summary), children);
}

function stateBadge(run) {
  return element("span", { class: "badge " + (STATE_CLASS[run.state.word] || "bad") }, run.state.word);
}

function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.filter(([, value]) => value != null && value !== "").flatMap(([name, value]) => [
    element("dt", {}, name), element("dd", {}, typeof value === "string" ? visible(value) : value)]));
}

function lastValue(run, name) {
  const values = (run.curves[name] || []).filter((value) => value != null);
  return values.length ? values[values.length - 1] : null;
}

// Whether a mean reward of an evaluation has been its accuracy all the time.
const repeatsAccuracy = (run, name) => name.endsWith("/reward_mean") && measured(run, name)[0].length === measured(run, name.replace("reward_mean", "accuracy"))[0].length;

// The name of a metric, which a narrow place breaks at its parts.
const breakable = (name) => visible(name).replaceAll("/", "/\u200b").replaceAll("_", "_\u200b");

// Of an evaluation half of the last 95% interval.
function lastInterval(run, name) {
  const half = name.startsWith("eval/") ? lastValue(run, standardError(name)) : null;
  return half == null ? null : element("small", { class: "soft", title: "95% interval" }, " ± " + number(1.96 * half, 2));
}

function tiles(run) {
  const named = HEADLINES.flatMap((pattern) => Object.keys(run.curves).filter((name) => pattern.test(name)));
  // An evaluation before the first step is a step 0, which has a time too.
  const known = (name) => run.curves[name].filter((value, place) => value != null && (run.curves.step[place] > 0 || name.startsWith("eval/")));
  return element("div", { class: "tiles" }, named.filter((name) => known(name).length && !repeatsAccuracy(run, name)).map((name) => {
    const values = known(name);
    return element("div", { class: "tile" }, element("span", {}, breakable(name)), element("b", {}, number(values[values.length - 1]), lastInterval(run, name)),
      element("span", {}, "at first " + number(values[0])));
  }));
}

function findingList(run) {
  if (!run.findings.length) return element("p", { class: "hint" }, run.state.step ? "No metric asks for a look." : "No step has ended yet.");
  return element("div", { class: "findings" }, run.findings.map((one) => element("div", { class: "finding" },
    element("a", { href: "#curves", click: () => findPanel(one.metric) }, one.metric), " " + one.says, element("br"),
    "Perhaps: " + one.cause + ". To do: ", element("span", { class: "mono" }, one.advice),
    element("div", { class: "hint" }, "docs/debugging.md#" + one.anchor))));
}

function settingsTable(run) {
  const kinds = ["command line", "recipe", "base", "default"];
  if (!shownKinds.has(run.name)) shownKinds.set(run.name, new Set(["command line", "recipe"]));
  const shown = shownKinds.get(run.name);
  const body = element("tbody");
  const draw = () => body.replaceChildren(...run.settings.filter((row) => shown.has(row.kind)).map((row) => element("tr", {},
    element("td", { class: "mono key" }, visible(row.key)), element("td", { class: "mono" }, visible(row.value)),
    element("td", { class: "mono soft" }, row.default == null ? "–" : row.default === row.value ? "the same" : visible(row.default)),
    element("td", { class: "soft" }, visible(row.from)))));
  draw();
  const count = (kind) => run.settings.filter((row) => row.kind === kind).length;
  const boxes = kinds.map((kind) => element("label", {}, element("input", { type: "checkbox", checked: shown.has(kind), change: (event) => {
    shown[event.target.checked ? "add" : "delete"](kind); draw();
  } }), kind + " (" + count(kind) + ")"));
  return [element("div", { class: "controls" }, boxes), element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ["setting", "value", "default", "from"].map((title) => element("th", {}, title)))), body))];
}

function runCard(run) {
  const { state, duration, model, machine } = run;
  const modelText = Object.entries(model).filter(([name]) => name !== "path").map(([name, value]) => name + " " + value).join(", ");
  const packages = Object.entries(machine.packages || {}).filter(([, version]) => version).map(([name, version]) => name + " " + version).join(", ");
  const git = machine.git && machine.git.commit ? machine.git.commit.slice(0, 12) + (machine.git.dirty ? ", with changes" : "") : null;
  return element("div", { class: "card" },
    element("h2", {}, element("span", { class: "swatch", style: "background:" + colour(run.family) }), visible(run.name) + " ", stateBadge(run),
      " step " + state.step + " of " + state.steps),
    state.cause ? element("pre", { class: state.word === "failed" ? "bad" : "soft" }, visible(state.cause)) : null,
    tiles(run),
    element("h3", {}, "To look at"), findingList(run),
    element("h3", {}, "Run"),
    facts([["folder", run.path], ["begun", duration.begun], ["last step at", duration.last],
      ["time in steps", seconds(duration.steps_s) + (duration.eval_s ? ", in evaluations " + seconds(duration.eval_s) : "")],
      ["starts", duration.starts > 1 ? String(duration.starts) : null], ["model", model.path], ["", modelText],
      ["machine", machine.host ? machine.host.name + ", " + machine.host.cpus + " CPUs, " + machine.platform : null],
      ["versions", packages ? packages + ", Python " + machine.python : null], ["commit", git],
      ["command", machine.command ? element("code", {}, visible(machine.command.join(" "))) : null]]),
    fold("settings " + run.path, RUNS.length === 1, {}, "recipe against its base", settingsTable(run)),
    state.log ? fold("log " + run.path, false, {}, "end of logs/driver.log", element("pre", { class: "mono" }, visible(state.log))) : null);
}

function differenceCard() {
  if (!DATA.differences.length) return null;
  return fold("differences", DATA.differences.length <= 12, { class: "card" }, "settings in which the runs differ: " + DATA.differences.length, element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, element("th", {}, "setting"), RUNS.map((run) => element("th", {}, visible(run.name))))),
    element("tbody", {}, DATA.differences.map((row) => element("tr", {}, element("td", { class: "mono key" }, visible(row.key)),
      row.values.map((value) => element("td", { class: "mono" }, value == null ? "–" : visible(value)))))))));
}

// The last values of several runs, side by side.
function comparisonCard() {
  if (RUNS.length === 1) return null;
  const names = HEADLINES.flatMap((pattern) => [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].filter((name) => pattern.test(name)));
  const shown = names.filter((name) => RUNS.some((run) => lastValue(run, name) != null && !repeatsAccuracy(run, name))).slice(0, 9);
  return element("div", { class: "card" }, element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ["run", "state", "step"].map((title) => element("th", {}, title)), shown.map((name) => element("th", { class: "number" }, breakable(name))))),
    element("tbody", {}, RUNS.map((run) => element("tr", {}, element("td", { class: "whole" }, element("span", { class: "swatch", style: "background:" + colour(run.family) }), visible(run.name)),
      element("td", {}, stateBadge(run)), element("td", { class: "number" }, run.state.step + " of " + run.state.steps),
      shown.map((name) => element("td", { class: "number" }, number(lastValue(run, name))))))))));
}

function drawOverview() {
  byId("part-overview").replaceChildren(...[comparisonCard(), ...RUNS.map(runCard), differenceCard(),
    element("p", { class: "hint" }, "Made " + DATA.made + " by slimrl report.")].filter(Boolean));
}
