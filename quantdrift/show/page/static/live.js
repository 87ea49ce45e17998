// Live updates: when the server says that something has changed, the page fetches itself and replaces its content.
(function () {
  "use strict";
  const status = document.getElementById("live");
  const url = document.body.dataset.events || "/events";
  let busy = false;
  let stale = false;

  function say(text) {
    if (status) status.textContent = text;
  }

  function local() {
    for (const time of document.querySelectorAll("time[datetime]")) {
      time.title = new Date(time.dateTime).toLocaleString() + " (your time)";
    }
  }

  // Nobody loses what they type, select or have open.
  function isUsed() {
    const active = document.activeElement;
    const areas = [...document.querySelectorAll("main textarea")];
    return (active && active.matches("input, textarea, select")) || areas.some((each) => each.value !== each.defaultValue);
  }

  // What the focus is on: its id, or its kind and text and how many like it stand before it.
  function placeOf(main, active) {
    if (!active || !main.contains(active) || active === main) return null;
    if (active.id) return (next) => document.getElementById(active.id);
    const alike = (root) => [...root.querySelectorAll(active.tagName)].filter((each) => each.textContent === active.textContent);
    const number = alike(main).indexOf(active);
    return (next) => alike(next)[number];
  }

  async function refresh() {
    if (isUsed()) return void (stale = true);
    if (busy) return void (stale = true);
    busy = true;
    stale = false;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok || new URL(answer.url).pathname !== location.pathname) return;
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
      const main = document.getElementById("main");
      if (isUsed()) return void (stale = true); // since the answer was asked for
      const active = document.activeElement;
      if (!next || next.innerHTML === main.innerHTML) return;
      const open = new Set([...main.querySelectorAll("details[open][id]")].map((each) => each.id));
      const place = placeOf(main, active);
      const top = scrollY;
      main.replaceChildren(...next.childNodes);
      for (const each of main.querySelectorAll("details[id]")) if (open.has(each.id)) each.open = true;
      const again = place && place(main);
      if (again) again.focus({ preventScroll: true });
      scrollTo(0, top);
      local();
    } catch {
      say("The server does not answer; this page tries again.");
    } finally {
      busy = false;
      if (stale && !isUsed()) setTimeout(refresh, 1000);
    }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Selected: press Ctrl+C";
    }
  });
  document.addEventListener("focusout", () => stale && setTimeout(refresh, 200));

  local();
  if (!document.querySelector("[data-live]")) return;
  const events = new EventSource(url);
  let version = "";
  events.addEventListener("open", () => say("Live."));
  events.addEventListener("changed", (event) => {
    if (version && event.data !== version && !document.hidden) refresh();
    else if (version && event.data !== version) stale = true;
    version = event.data;
  });
  events.addEventListener("error", () => say("Not live: the server does not answer. This page tries again."));
  document.addEventListener("visibilitychange", () => !document.hidden && stale && refresh());
})();
