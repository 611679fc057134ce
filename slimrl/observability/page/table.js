// The table of trajectories: sorted, filtered, and drawn only where it is seen.
const ROW_HEIGHT = 28;
const ALL_COLUMNS = [ // column, title, width, whether it is a number
  ["run", "run", "8rem", false], ["step", "step", "3.6rem", true], ["set", "set", "5.5rem", false], ["source", "source", "6rem", false],
  ["group", "group", "7.5rem", false], ["reward", "reward", "5rem", true], ["advantage", "advantage", "6.2rem", true], ["status", "status", "5.6rem", false],
  ["turns", "turns", "3.6rem", true], ["tokens", "tokens", "4.4rem", true], ["errors", "errors", "4rem", true], ["version", "version", "4.4rem", true],
  ["gap", "largest gap", "6rem", true],
];
let COLUMNS = {}, NUM_ROWS = 0, TABLE = [];
let rowOfKey = new Map(); // name of a trajectory that later data of the page have too -> its row
const keyOf = (row) => [COLUMNS.run[row], COLUMNS.step[row], COLUMNS.set[row], COLUMNS.id[row]].join("\n");
const table = { sort: null, down: false, filters: {}, words: "", found: null, rows: [], made: new Map(), chosen: -1, search: 0, isSearching: false,
  searched: new Map() }; // packed part -> whether its conversation has the words

// What the table keeps of rows is found again in other data by the rows' keys.
readers.push(() => {
  const chosen = table.chosen < 0 ? null : keyOf(table.chosen), found = table.found && [...table.found].map(keyOf);
  COLUMNS = DATA.trajectories.columns;
  NUM_ROWS = DATA.trajectories.shown;
  if (COLUMNS.set) COLUMNS.set = COLUMNS.set.map((value) => value || "training");
  rowOfKey = new Map(Array.from({ length: NUM_ROWS }, (_, row) => [keyOf(row), row]));
  TABLE = ALL_COLUMNS.filter(([name]) => (["run", "set", "source"].includes(name) ? new Set(COLUMNS[name]).size > 1 :
    (COLUMNS[name] || []).some((value) => value != null && value !== "" && (name !== "errors" || value))));
  table.chosen = rowOfKey.get(chosen) ?? -1;
  table.found = found && new Set(found.map((key) => rowOfKey.get(key)).filter((row) => row !== undefined));
  for (const made of table.made.values()) made.remove();
  table.made.clear();
});

const cellText = (name, row) => {
  const value = COLUMNS[name][row];
  if (name === "run") return visible(RUNS[value].name);
  if (name === "step" && value < 0) return "–";
  // Ids of a data set differ at their ends.
  if (name === "group" && value.length > 16) return "…" + visible(value.slice(-15));
  if (name === "set") return value || "training";
  return typeof value === "number" ? number(value, 3) : value == null ? "–" : visible(value);
};

const REWARD_FILTERS = {
  positive: (reward) => reward != null && reward > 0, zero: (reward) => reward === 0,
  negative: (reward) => reward != null && reward < 0, none: (reward) => reward == null,
};

function passes(row) {
  for (const [name, wanted] of Object.entries(table.filters)) {
    if (wanted === "") continue;
    if (name === "reward") { if (!REWARD_FILTERS[wanted](COLUMNS.reward[row])) return false; }
    else if (String(COLUMNS[name][row] ?? "") !== wanted) return false;
  }
  return !table.found || table.found.has(row);
}

// The rows that pass, in the order that is asked for. Unknown values are last in both directions.
function arrange() {
  const rows = [];
  for (let row = 0; row < NUM_ROWS; row++) if (passes(row)) rows.push(row);
  if (table.sort) {
    const values = COLUMNS[table.sort], sign = table.down ? -1 : 1;
    const isUnknown = (value) => value == null || value === "";
    rows.sort((a, b) => {
      const one = values[a], two = values[b];
      if (isUnknown(one) || isUnknown(two)) return isUnknown(one) - isUnknown(two) || a - b;
      return (typeof one === "number" ? sign * (one - two) : sign * String(one).localeCompare(String(two))) || a - b;
    });
  }
  table.rows = rows;
  byId("table-body").style.height = rows.length * ROW_HEIGHT + "px";
  const { shown, found } = DATA.trajectories;
  byId("counts").textContent = rows.length + " of " + shown + " trajectories" + (found > shown ? "; the run has recorded " + found : "") +
    (table.isSearching ? " – searching …" : "");
  drawHead();
  drawRows();
}

function drawHead() {
  byId("table-head").style.gridTemplateColumns = TABLE.map(([, , width]) => width).join(" ");
  byId("table-head").replaceChildren(...TABLE.map(([name, title, , isNumber]) => element("button", {
    type: "button", class: isNumber ? "number" : "", title: "sort", click: () => sortBy(name, table.sort === name ? !table.down : isNumber),
  }, title + (table.sort === name ? (table.down ? " ↓" : " ↑") : ""))));
}

function sortBy(name, down) {
  Object.assign(table, { sort: name, down });
  arrange();
  byId("table").scrollTop = 0;
}

// Rows that come into view are made, those that leave it go.
function drawRows() {
  const holder = byId("table"), body = byId("table-body");
  const first = Math.max(0, Math.floor(holder.scrollTop / ROW_HEIGHT) - 8);
  const last = Math.min(table.rows.length, Math.ceil((holder.scrollTop + holder.clientHeight) / ROW_HEIGHT) + 8);
  for (const [place, made] of table.made) {
    if (place < first || place >= last || Number(made.dataset.row) !== table.rows[place]) { made.remove(); table.made.delete(place); }
  }
  let above = null;
  for (let place = first; place < last; place++) {
    if (!table.made.has(place)) {
      table.made.set(place, rowView(table.rows[place], place));
      if (above) above.after(table.made.get(place));
      else body.prepend(table.made.get(place));
    }
    above = table.made.get(place);
    above.setAttribute("aria-selected", String(table.rows[place] === table.chosen));
  }
}

function rowView(row, place) {
  return element("div", {
    class: "row", role: "row", "data-row": row, click: () => choose(row),
    style: "top:" + place * ROW_HEIGHT + "px;grid-template-columns:" + TABLE.map(([, , width]) => width).join(" "),
  }, TABLE.map(([name, , , isNumber]) => element("span", {
    class: (isNumber ? "number " : "") + (name === "reward" && COLUMNS.reward[row] > 0 ? "good" : name === "status" && COLUMNS.status[row] !== "completed" ? "warn" : ""),
  }, cellText(name, row))));
}

// Open a trajectory, and bring its row into view.
function choose(row, keepHash = false) {
  table.chosen = row;
  const holder = byId("table"), place = table.rows.indexOf(row), top = place * ROW_HEIGHT;
  if (place >= 0 && (top < holder.scrollTop || top > holder.scrollTop + holder.clientHeight - 2 * ROW_HEIGHT))
    holder.scrollTop = top - holder.clientHeight / 2;
  drawRows();
  if (!keepHash) history.replaceState(null, "", "#trajectories/" + row);
  showDetail(row);
}

function chooseNext(by) {
  if (!table.rows.length) return;
  const place = table.rows.indexOf(table.chosen);
  choose(table.rows[Math.min(table.rows.length - 1, Math.max(0, place < 0 ? 0 : place + by))]);
}

// Search conversations as they are unpacked; a later search ends an earlier one.
async function searchTexts(words) {
  const mine = ++table.search, columns = COLUMNS, count = NUM_ROWS;
  if (words !== table.words) table.searched = new Map();
  Object.assign(table, { words, isSearching: words !== "" });
  if (!words) { table.found = null; arrange(); return; }
  const wanted = words.toLowerCase(), found = new Set();
  table.found = found;
  let drawn = performance.now();
  for (let row = 0; row < count; row++) {
    const part = columns.part[row];
    if (!table.searched.has(part)) {
      const texts = JSON.stringify(Object.values(textsOf(await conversationOf(part)))).toLowerCase();
      if (table.search !== mine) return;
      table.searched.set(part, texts.includes(JSON.stringify(wanted).slice(1, -1)));
    }
    if (table.searched.get(part)) found.add(row);
    if (performance.now() - drawn > 200) {
      await new Promise((done) => setTimeout(done));
      if (table.search !== mine) return;
      arrange();
      drawn = performance.now();
    }
  }
  if (table.search !== mine) return;
  table.isSearching = false;
  arrange();
}

// Called by a figure: the trajectories of one step of a run.
function showStep(runName, step) {
  if (!NUM_ROWS) return;
  // Fills the filters if this part was not drawn yet.
  location.hash = "#trajectories";
  route();
  clearFilters();
  const run = RUNS.findIndex((one) => one.name === runName);
  byId("filter-step").value = String(step);
  table.filters = { step: byId("filter-step").value, ...(RUNS.length > 1 ? { run: String(run) } : {}) };
  byId("filter-run").value = table.filters.run || "";
  arrange();
  if (table.rows.length) choose(table.rows[0]);
}

function clearFilters() {
  for (const name of ["run", "step", "set", "source", "status", "reward"]) byId("filter-" + name).value = "";
  byId("search").value = "";
  Object.assign(table, { filters: {}, words: "", found: null, search: table.search + 1, isSearching: false, sort: null });
  arrange();
}

function fillFilters() {
  for (const [name, title] of [["run", "all runs"], ["step", "all steps"], ["set", "training and evaluation"], ["source", "all sources"], ["status", "any status"]]) {
    const values = [...new Set(COLUMNS[name] || [])].filter((value) => value != null && value !== "");
    values.sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
    const titled = (value) => (name === "run" ? RUNS[value].name : name === "step" ? (value < 0 ? "no step" : "step " + value) : value);
    fillSelect(byId("filter-" + name), [["", title], ...values.map((value) => [value, visible(titled(value))])]);
    byId("filter-" + name).hidden = values.length < 2;
  }
  byId("largest-gaps").hidden = !TABLE.some(([name]) => name === "gap");
}

// Draw other data: the rows that were in view stay there, and what is open stays open.
function updateTable(first) {
  fillFilters();
  arrange();
  const holder = byId("table"), place = first ? table.rows.indexOf(rowOfKey.get(first.key)) : -1;
  if (place >= 0) holder.scrollTop = place * ROW_HEIGHT + first.offset;
  drawRows();
  if (table.words) searchTexts(table.words);
  if (table.chosen < 0) return;
  if (location.hash.startsWith("#trajectories/")) history.replaceState(null, "", "#trajectories/" + table.chosen);
  if (detail.part !== COLUMNS.part[table.chosen]) showDetail(table.chosen, byId("detail").scrollTop);
}

// The first row in view, unless the reader sees the beginning.
function firstInView() {
  const { scrollTop } = byId("table"), place = Math.floor(scrollTop / ROW_HEIGHT);
  return scrollTop > 0 && table.rows[place] !== undefined ? { key: keyOf(table.rows[place]), offset: scrollTop - place * ROW_HEIGHT } : null;
}

function startTable() {
  fillFilters();
  for (const name of ["run", "step", "set", "source", "status", "reward"])
    byId("filter-" + name).addEventListener("change", (event) => { table.filters[name] = event.target.value; arrange(); });
  let wait = 0;
  byId("search").addEventListener("input", (event) => { clearTimeout(wait); wait = setTimeout(() => searchTexts(event.target.value.trim()), 250); });
  byId("largest-gaps").addEventListener("click", () => { sortBy("gap", true); if (table.rows.length) { setView("tokens"); choose(table.rows[0]); } });
  byId("clear-filters").addEventListener("click", clearFilters);
  byId("table").addEventListener("scroll", drawRows, { passive: true });
  new ResizeObserver(drawRows).observe(byId("table"));
}
