// One trajectory: as a conversation, beside its group, or as tokens.
const FIRST_CHARACTERS = 12000; // of a text, before it is asked for more
const detail = { view: "conversation", asked: 0, part: null };
const cachedConversations = new Map(); // packed part -> its value

async function conversationOf(part) {
  if (!cachedConversations.has(part)) {
    const conversation = await unpacked("c" + part);
    if (conversation === null) return { messages: [] };
    if (cachedConversations.size > 300) cachedConversations.delete(cachedConversations.keys().next().value);
    cachedConversations.set(part, conversation);
  }
  return cachedConversations.get(part);
}

const textsOf = ({ messages, label, metadata = {} }) => ({ messages, label, error: metadata.error, subagents: (metadata.subagents || []).map((one) => one.messages) });

function setView(view) {
  detail.view = view;
}

async function showDetail(row, scrollTop = 0) {
  const asked = ++detail.asked, columns = COLUMNS, key = keyOf(row), part = columns.part[row], hasTokens = columns.has_tokens[row];
  const conversation = await conversationOf(part);
  const view = detail.view === "tokens" && !hasTokens ? "conversation" : detail.view;
  const segments = view === "tokens" ? await unpacked("t" + part) : null;
  const content = segments ? tokenView(segments, conversation) : view === "group" ? await groupView(row, columns) : conversationView(conversation);
  if (asked !== detail.asked) return;
  detail.part = part;
  const views = ["conversation", "tokens", "group"].filter((name) => name !== "tokens" || hasTokens);
  const again = () => { if (rowOfKey.has(key)) showDetail(rowOfKey.get(key)); };
  const buttons = views.map((name) => element("button", { type: "button", "data-view": name, "aria-pressed": String(name === view), click: () => { setView(name); again(); } }, name));
  byId("detail").replaceChildren(
    element("div", { class: "detail-head" }, element("button", { type: "button", title: "previous (k)", click: () => chooseNext(-1) }, "‹"),
      element("button", { type: "button", title: "next (j)", click: () => chooseNext(1) }, "›"), buttons),
    detailFacts(row, columns, conversation), content);
  byId("detail").scrollTop = scrollTop;
}

function detailFacts(row, columns, conversation) {
  const value = (name) => (columns[name] ? columns[name][row] : null);
  const parts = (given) => Object.entries(given || {}).map(([name, one]) => name + " " + number(one)).join(", ");
  const words = [
    "reward " + number(value("reward")), parts(conversation.rewards), parts(conversation.role_rewards),
    value("advantage") == null ? "" : "advantage " + number(value("advantage")), value("status"), (value("turns") ?? "–") + (value("turns") === 1 ? " turn" : " turns"),
    value("tokens") == null ? "" : number(value("tokens")) + " tokens", value("sampled") == null ? "" : number(value("sampled")) + " sampled", value("version") == null ? "" : "version " + value("version"),
    value("gap") == null ? "" : "largest gap " + number(value("gap"), 3) + " nat",
  ].filter(Boolean).join(" · ");
  const error = (conversation.metadata || {}).error;
  return element("div", {}, element("div", { class: "mono soft id" }, visible(value("id") + "  " + value("group"))), element("div", { class: "hint" }, visible(words)),
    error ? element("pre", { class: "bad" }, visible(error)) : null,
    conversation.label == null ? null : element("div", { class: "hint" }, "label ", shortText(typeof conversation.label === "string" ? conversation.label : JSON.stringify(conversation.label))));
}

// A text with the words that are searched for marked; a long one is shown in parts.
function longText(text) {
  const holder = element("pre");
  let shown = 0;
  const more = (count) => {
    const piece = text.slice(shown, shown + count);
    shown += piece.length;
    holder.append(...marked(visible(piece)));
    if (shown < text.length)
      holder.append(element("button", { type: "button", click: (event) => { event.target.remove(); more(8 * FIRST_CHARACTERS); } },
        "more: " + number(text.length - shown) + " characters are left"));
  };
  more(FIRST_CHARACTERS);
  return holder;
}

const shortText = (text) => (text.length < 200 ? element("code", {}, visible(text)) : longText(text));

function marked(text) {
  const words = table.words.toLowerCase(), lower = text.toLowerCase(), found = [];
  if (!words || lower.length !== text.length) return [text];
  let begin = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, begin)) {
    found.push(text.slice(begin, at), element("mark", {}, text.slice(at, at + words.length)));
    begin = at + words.length;
  }
  return [...found, text.slice(begin)];
}

// Words and thinking of a message: thinking has a field of its own, or stands between tags at the beginning.
function saidAndThought(message) {
  let words = message.content;
  if (Array.isArray(words)) words = words.map((part) => part.text ?? JSON.stringify(part)).join("\n");
  words = words == null ? "" : typeof words === "string" ? words : JSON.stringify(words);
  let thought = message.reasoning_content || message.thinking || message.reasoning || "";
  const begin = words.indexOf("<think>"), end = words.indexOf("</think>");
  if (!thought && message.role === "assistant" && end >= 0 && (begin < 0 || words.slice(0, begin).trim() === "")) {
    thought = words.slice(begin < 0 ? 0 : begin + 7, end);
    words = words.slice(end + 8);
  }
  return [words.trim(), String(thought).trim()];
}

function callView(call) {
  const given = call.function || call;
  const short = typeof given.arguments === "string" ? given.arguments : JSON.stringify(given.arguments);
  const named = short && short.length > 80 && typeof given.arguments === "object" ? JSON.stringify(given.arguments, null, 1) : short;
  return element("div", { class: "call" }, element("b", { class: "mono" }, visible(given.name ?? "?")), longText(named ?? ""));
}

function messageView(message, facts, isOther) {
  const [words, thought] = saidAndThought(message);
  const role = ["user", "assistant", "tool", "system"].includes(message.role) ? message.role : "user";
  const who = [message.role, message.name, message.conversation ? "conversation " + message.conversation : null, ...facts].filter(Boolean);
  return element("div", { class: "message " + role + (isOther ? " other" : "") },
    element("div", { class: "who" }, who.map((word) => element("span", {}, visible(word)))),
    thought ? element("details", {}, element("summary", {}, "thinking, " + number(thought.length) + " characters"), longText(thought)) : null,
    words ? longText(words) : null, (message.tool_calls || []).map(callView));
}

// What a sub-agent was asked and said, below the turn that called it.
function subagentView({ name, call, status, messages, num_prompt_messages: prompts }) {
  const turns = messages.slice(prompts).filter((message) => message.role === "assistant").length;
  const says = "sub-agent " + name + ", call " + call + ", " + turns + (turns === 1 ? " turn, " : " turns, ") + status;
  return element("details", { class: "subagent", open: true }, element("summary", {}, visible(says)), messages.map((message) => messageView(message, [], false)));
}

function conversationView(conversation) {
  const { metadata = {}, images = {}, turn_rewards: rewards = [] } = conversation;
  const environment = metadata.environment || {};
  const first = (conversation.messages.find((message) => message.conversation) || {}).conversation;
  const prompts = metadata.num_prompt_messages || 0;
  const made = [];
  let turn = 0;
  const image = (number) => (images[number] ? element("img", { src: "data:image/png;base64," + images[number], alt: "state before turn " + number, loading: "lazy" }) : null);
  // With several roles, turns are numbered through all conversations, which stand here one after the other.
  const numbered = first === undefined;
  const subagentsOf = (number) => (metadata.subagents || []).filter((one) => one.turn === number).map(subagentView);
  conversation.messages.forEach((message, place) => {
    const facts = [];
    if (numbered && message.role === "assistant" && place >= prompts) {
      const before = image(turn);
      if (before) made.push(element("div", { class: "message" }, element("div", { class: "who" }, "what the environment showed before turn " + turn), before));
      const state = (environment.states || [])[turn];
      facts.push("turn " + turn, state ? "state " + String(state).slice(0, 40) : null, rewards[turn] == null ? null : "reward of the turn " + number(rewards[turn]));
      turn++;
    }
    made.push(messageView(message, facts, message.conversation && message.conversation !== first));
    if (numbered && message.role === "assistant" && place >= prompts) made.push(...subagentsOf(turn - 1));
  });
  if (!numbered) Object.keys(images).forEach((one) => made.push(element("div", { class: "message" }, element("div", { class: "who" }, "what the environment showed before turn " + one), image(one))));
  else if (images[turn]) made.push(element("div", { class: "message" }, element("div", { class: "who" }, "what the environment showed at the end"), image(turn)));
  const { error, subagents, ...rest } = metadata;
  return element("div", {}, made, element("details", {}, element("summary", {}, "metadata and state of the environment"), longText(JSON.stringify(rest, null, 2))));
}

// All trajectories of the chosen one's group, side by side.
async function groupView(row, columns) {
  const same = ["run", "step", "set", "group"], count = columns.id.length;
  const members = [];
  for (let other = 0; other < count; other++) if (same.every((name) => columns[name][other] === columns[name][row])) members.push(other);
  const rewards = members.map((one) => columns.reward[one]).filter((value) => value != null);
  const scale = Math.max(1e-9, ...members.map((one) => Math.abs(columns.advantage[one] ?? 0)));
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const keys = members.map(keyOf);
  const cards = await Promise.all(members.map(async (one, place) => {
    const conversation = await conversationOf(columns.part[one]), advantage = columns.advantage[one];
    const said = conversation.messages.slice((conversation.metadata || {}).num_prompt_messages || 1);
    const width = 50 * Math.abs(advantage ?? 0) / scale;
    return element("div", { class: "member" + (one === row ? " chosen" : "") },
      element("button", { type: "button", click: () => { if (rowOfKey.has(keys[place])) { setView("conversation"); choose(rowOfKey.get(keys[place])); } } }, "open"),
      element("div", {}, "reward " + number(columns.reward[one]) + (advantage == null ? "" : ", advantage " + number(advantage))),
      advantage == null ? null : element("div", { class: "bar", title: "advantage" }, element("i", { style: "width:" + width + "%;left:" + (advantage < 0 ? 50 - width : 50) + "%;background:var(--" + (advantage < 0 ? "bad" : "good") + ")" })),
      element("div", { class: "hint" }, columns.status[one] + ", " + (columns.turns[one] ?? "–") + " turns, " + number(columns.tokens[one]) + " tokens"),
      said.map((message) => messageView(message, [], false)));
  }));
  const { messages, metadata = {} } = await conversationOf(columns.part[row]);
  return element("div", {}, messages.slice(0, metadata.num_prompt_messages || 1).map((message) => messageView(message, [], false)),
    element("p", { class: "hint" }, members.length + (members.length === 1 ? " trajectory of the group is" : " trajectories of the group are") + " on this page; mean reward " + number(mean)),
    element("div", { class: "group" }, cards));
}
