// The page of slimrl report --follow: asks for newer data while it is seen, and for packed parts.
const POLL_MS = 2000, RETRY_MS = 10000;
const address = (path, asked) => path + "?" + new URLSearchParams({ key: new URLSearchParams(location.search).get("key"), ...asked });
let failures = 0;

// [status, text] of an answer; the status is 0 if there is none.
async function ask(path, asked) {
  try {
    const answer = await fetch(address(path, asked));
    return [answer.status, await answer.text()];
  } catch {
    return [0, "slimrl report --follow has ended, or cannot be reached"];
  }
}

async function askedPart(id) {
  const [status, text] = await ask("part", { name: id });
  return status === 200 ? text : null;
}

async function follow() {
  const [status, text] = document.hidden ? [204, ""] : await ask("data", { version: DATA.version });
  const fails = status !== 200 && status !== 204;
  if (status === 200) update(JSON.parse(text));
  failures = fails ? failures + 1 : 0;
  // A file that is just being written can be read the next time.
  if (failures !== 1) byId("follow").textContent = fails ? "not followed: " + visible(text) : "following, data of " + new Date(DATA.made).toLocaleTimeString();
  setTimeout(follow, failures > 1 ? RETRY_MS : POLL_MS);
}

if (DATA.version) {
  byId("follow").hidden = false;
  follow();
}
