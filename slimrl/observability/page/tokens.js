// The tokens of a trajectory, coloured by a quantity.
const BLOCK = 400; // tokens of one block
const FIRST_BLOCKS = 15; // before more is asked for
const tokenSettings = { quantity: "loss mask" };
const DIVERGING = new Set(["advantage", "trainer - engine", "importance ratio"]);
const DIVERGES_FROM = { "importance ratio": 1 };
const CATEGORIES = { "loss mask": "mask", "weight version": "versions", turn: "turns", "clipped": "clipped" };
const LOG_PROBS = "log-prob of the trainer";

// Values of every quantity of a segment: numbers, or categories.
function quantitiesOf(segment) {
  const made = {};
  for (const [title, field] of Object.entries(CATEGORIES)) if (segment[field]) made[title] = segment[field];
  for (const [title, packed] of Object.entries(segment.quantities)) made[title] = quantityValues(packed);
  const engine = made["log-prob of the engine"], gap = made["trainer - engine"];
  if (engine && gap) made[LOG_PROBS] = engine.map((value, place) => value + gap[place]);
  return made;
}

// How a quantity is coloured: the same for all segments of a trajectory.
function scaleOf(title, all) {
  if (title in CATEGORIES) return { values: [...new Set(all.flatMap((one) => [...(one[title] || [])]))].sort((a, b) => a - b) };
  const centre = DIVERGES_FROM[title] ?? 0;
  const known = all.flatMap((one) => [...(one[title] || [])].filter((value) => !Number.isNaN(value))).map((value) => Math.abs(value - centre)).sort((a, b) => a - b);
  return { centre, most: known[Math.min(known.length - 1, Math.floor(0.99 * known.length))] || known[known.length - 1] || 0 };
}

function tint(title, scale, value) {
  if (value == null || Number.isNaN(value)) return "";
  if (scale.values) {
    if (value < 0 || (title !== "turn" && title !== "weight version" && value === 0)) return "";
    return withAlpha(colour(title === "loss mask" || title === "clipped" ? 1 : scale.values.indexOf(value)), 0.35);
  }
  const size = scale.most ? Math.min(1, Math.abs(value - scale.centre) / scale.most) : 0;
  const hue = DIVERGING.has(title) ? (value < scale.centre ? "#dc2626" : "#2563eb") : "#ea580c";
  return withAlpha(hue, Number((0.75 * size).toFixed(3)));
}

function legendView(title, scale) {
  if (scale.values) {
    const named = (value) => (title === "loss mask" ? (value ? "trained" : "not trained") : title === "clipped" ? (value ? "clipped" : "not clipped") : value < 0 ? "not sampled" : title + " " + value);
    return element("span", { class: "scale" }, scale.values.slice(0, 12).map((value) => element("span", {},
      element("span", { class: "swatch", style: "background:" + (tint(title, scale, value) || "var(--code)") }), named(value))));
  }
  const steps = DIVERGING.has(title) ? [-1, -0.66, -0.33, 0, 0.33, 0.66, 1] : title.startsWith("log-prob") ? [0, -0.25, -0.5, -0.75, -1] : [0, 0.25, 0.5, 0.75, 1];
  const at = (part) => scale.centre + part * scale.most;
  return element("span", { class: "scale" }, number(at(steps[0]), 3), element("span", { class: "ramp" },
    steps.map((part) => element("i", { style: "background:" + (tint(title, scale, at(part)) || "none") }))), number(at(steps[steps.length - 1]), 3),
  " (the 99th percentile)");
}

const shownText = (text) => (text === "" ? "·" : visible(text).replaceAll("\n", "⏎\n"));

function tokenView(segments, conversation) {
  const subagents = (conversation.metadata || {}).subagents || [];
  const speaker = (place) => { const one = subagents.find((other) => place >= other.segments[0] && place < other.segments[1]); return one ? ", sub-agent " + visible(one.name) : ""; };
  const all = segments.map(quantitiesOf);
  const names = [...new Set(all.flatMap((one) => Object.keys(one)))];
  if (!names.includes(tokenSettings.quantity)) tokenSettings.quantity = names[0];
  const info = element("div", { class: "token-info mono" }, "Point at a token, or tap it.");
  const legend = element("span");
  const holder = element("div", { class: "tokens" });
  const spans = segments.map(() => []);
  const paint = (place, index) => {
    const title = tokenSettings.quantity, scale = painted.scale;
    spans[place][index].style.backgroundColor = tint(title, scale, (all[place][title] || [])[index]);
  };
  const painted = { scale: null };
  const repaint = () => {
    painted.scale = scaleOf(tokenSettings.quantity, all);
    legend.replaceChildren(legendView(tokenSettings.quantity, painted.scale));
    spans.forEach((list, place) => list.forEach((_, index) => paint(place, index)));
  };
  painted.scale = scaleOf(tokenSettings.quantity, all);

  const fill = (place, until) => {
    const segment = segments[place], target = holder.children[place].querySelector(".text");
    while (spans[place].length < Math.min(until, segment.texts.length)) {
      const block = element("div", { class: "block", style: "display:inline" });
      for (let count = 0; count < BLOCK && spans[place].length < segment.texts.length; count++) {
        const index = spans[place].length;
        const span = element("span", { class: (segment.mask[index] ? "" : "unsampled") + (segment.clipped && segment.clipped[index] ? " clipped" : ""), "data-at": place + "/" + index }, shownText(segment.texts[index]));
        spans[place].push(span);
        paint(place, index);
        block.append(span);
      }
      target.append(block);
    }
    const rest = segment.texts.length - spans[place].length;
    const more = holder.children[place].querySelector(".more");
    more.replaceChildren(...(rest ? [element("button", { type: "button", click: () => fill(place, spans[place].length + 4 * FIRST_BLOCKS * BLOCK) }, "more: " + number(rest) + " tokens are left")] : []));
  };

  let chosen = null, jumped = 0;
  const tell = (place, index) => {
    const segment = segments[place];
    if (chosen) chosen.classList.remove("chosen");
    chosen = spans[place][index];
    chosen.classList.add("chosen");
    const values = Object.entries(all[place]).map(([title, list]) => [title, list[index]]).filter(([, value]) => value != null && !Number.isNaN(value) && value !== -1)
      .map(([title, value]) => title + " " + number(value, 5));
    info.textContent = visible(JSON.stringify(segment.texts[index])) + " · id " + segment.ids[index] + " · position " + index +
      (segments.length > 1 ? " of segment " + place : "") + (segment.role ? " · role " + visible(segment.role) : "") + " · " + values.join(" · ");
  };
  const pointed = (event) => {
    // A jump moves tokens under a pointer that stands still.
    if (event.type === "pointerover" && performance.now() - jumped < 500) return;
    const at = event.target.dataset && event.target.dataset.at;
    if (at) tell(...at.split("/").map(Number));
  };
  holder.addEventListener("pointerover", pointed);
  holder.addEventListener("click", pointed);

  const jump = (place, index) => {
    jumped = performance.now();
    fill(place, index + 1);
    tell(place, index);
    spans[place][index].scrollIntoView({ block: "center" });
  };
  segments.forEach((segment, place) => holder.append(element("div", {},
    segments.length > 1 || segment.role ? element("h3", {}, "segment " + place + (segment.role ? ", " + visible(segment.role) : "") + speaker(place) + ", " + number(segment.texts.length) + " tokens") : null,
    element("div", { class: "text", dir: "ltr" }), element("div", { class: "more" }))));
  segments.forEach((_, place) => fill(place, FIRST_BLOCKS * BLOCK));
  legend.append(legendView(tokenSettings.quantity, painted.scale));
  const select = element("select", { id: "quantity", "aria-label": "Quantity that colours tokens", change: (event) => { tokenSettings.quantity = event.target.value; repaint(); drawJumps(); } },
    names.map((name) => element("option", { value: name, selected: name === tokenSettings.quantity }, name)));
  const jumps = element("div", { class: "controls" });
  const drawJumps = () => {
    const found = largest(all, tokenSettings.quantity, painted.scale);
    jumps.replaceChildren(...(found.length ? ["Farthest: "] : []), ...found.map(([place, index, value]) => element("button", {
      type: "button", class: "mono", click: () => jump(place, index) }, shownText(segments[place].texts[index]).trim().slice(0, 12) + " " + number(value, 3))));
  };
  drawJumps();
  return element("div", {}, element("div", { class: "controls" }, element("label", {}, "Colour by ", select), legend),
    jumps, holder, info);
}

// The ten tokens whose value is farthest from where the scale begins: [segment, position, value].
function largest(all, title, scale) {
  if (scale.values) return [];
  const found = all.flatMap((one, place) => [...(one[title] || [])].map((value, index) => [place, index, value])).filter(([, , value]) => !Number.isNaN(value));
  return found.sort((a, b) => Math.abs(b[2] - scale.centre) - Math.abs(a[2] - scale.centre)).slice(0, 10);
}
