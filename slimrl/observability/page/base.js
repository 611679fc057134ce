// Data of the page, elements, numbers, colours and packed parts. Texts of runs become text nodes alone.
// A page that follows its runs gets other data later; each file's reader then takes what it keeps of them.
let DATA = null, RUNS = [];
const readers = [];
function readData(data) {
  DATA = data;
  RUNS = data.runs;
  readers.forEach((read) => read());
}
const PALETTE = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#db2777", "#ca8a04", "#64748b", "#dc2626", "#4f46e5"];
const colour = (number) => PALETTE[number % PALETTE.length];
const byId = (id) => document.getElementById(id);

// An element with attributes (functions are listeners) and children (texts or elements; null is left out).
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) if (child != null) made.append(child);
  return made;
}

// What steers a terminal or is not seen, as in slimrl/base/visible.py; tab and newline stay.
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const visible = (text) => String(text).replace(HIDDEN, (one) => "\\u" + one.charCodeAt(0).toString(16).padStart(4, "0"));

function number(value, digits = 4) {
  if (value == null) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en").replaceAll(",", "\u202f");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value == null) return "–";
  const whole = Math.round(value);
  if (whole < 120) return number(Number(value.toPrecision(3))) + " s";
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? hours + " h " + minutes + " min" : minutes + " min " + (whole % 60) + " s";
}

// Whether the page is dark, and what is done again when that changes.
const repaints = [];
const isDark = () => document.documentElement.dataset.theme === "dark";
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  repaints.forEach((repaint) => repaint());
}

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Axes and colours that all figures share.
function figureLayout(extra) {
  const axis = { gridcolor: cssColour("--grid"), zerolinecolor: cssColour("--grid"), linecolor: cssColour("--line"), automargin: true };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    margin: { l: 50, r: 10, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: cssColour("--text"), size: 11, family: "system-ui, sans-serif" }, hovermode: "closest", uirevision: "kept", modebar: { bgcolor: "rgba(0,0,0,0)", color: cssColour("--soft"), activecolor: cssColour("--accent") },
    hoverlabel: { bgcolor: cssColour("--card"), bordercolor: cssColour("--line"), font: { color: cssColour("--text") } },
    legend: { orientation: "h", y: -0.12, yanchor: "top", font: { size: 10 } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}
// Buttons are named one by one, since others send the figure's data to a server.
const FIGURE = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  plotlyServerURL: "", showSendToCloud: false, showLink: false, showEditInChartStudio: false };

// The value of a packed part: Base64 of gzipped JSON, in a script element that is read once it is asked for, or from
// slimrl report --follow. Null if there is none.
async function unpacked(id) {
  const text = DATA.version ? await askedPart(id) : await writtenPart(id);
  if (text === null) return null;
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function writtenPart(id) {
  if (!byId(id) && document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  return byId(id) && byId(id).textContent;
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
}

// Numbers of a packed quantity; NaN where unknown.
function quantityValues(packed) {
  const bytes = bytesOf(packed.data), view = new DataView(bytes.buffer, bytes.byteOffset), values = new Float64Array(bytes.length / 2);
  const scale = (packed.high - packed.low) / 65534;
  for (let place = 0; place < values.length; place++) {
    const level = view.getUint16(2 * place, true);
    values[place] = level === 65535 ? NaN : packed.low + level * scale;
  }
  return values;
}

// Give a select its options; what is chosen stays if it is among them, and one that has them already stays as it is.
function fillSelect(select, options) {
  const given = JSON.stringify(options), { value } = select;
  if (select.dataset.options === given) return;
  select.dataset.options = given;
  select.replaceChildren(...options.map(([one, title]) => element("option", { value: one }, title)));
  if (options.some(([one]) => String(one) === value)) select.value = value;
}

// A name in a figure, where Plotly would read tags.
const plain = (text) => visible(text).replaceAll("&", "＆").replaceAll("<", "‹").replaceAll(">", "›");
