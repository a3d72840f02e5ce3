/* The console works without this file. It adds live updates, keys, copying, countdowns and a pane that does not reload. */
"use strict";

const STREAM_FAILURES = 2; // then it polls
const POLL_EVERY = 10_000;
const CHECK_EVERY = 20_000; // while a stream is open
const STREAM_AGAIN = 60_000;
const TICK = 1_000;
const WATCH_EVERY = 10_000;

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const isTyping = (element) => element.matches?.("input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]");

// ---- time: the database's clock, carried on by the browser's monotonic one
const loadedAt = performance.now();
const serverNow = Date.parse(document.documentElement.dataset.now) || Date.now();
const now = () => serverNow + (performance.now() - loadedAt);

function inWords(milliseconds, parts) {
  let seconds = Math.max(0, Math.floor(milliseconds / 1000));
  const found = [];
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]]) {
    if (seconds >= size) {
      found.push(`${Math.floor(seconds / size)} ${unit}`);
      seconds %= size;
    }
  }
  return found.slice(0, parts).join(" ") || "0 s";
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tick() {
  for (const element of $$("time[data-age]")) {
    setText(element, inWords(now() - Date.parse(element.dateTime), Number(element.dataset.age)));
  }
  for (const element of $$("[data-until]")) {
    const left = Date.parse(element.dataset.until) - now();
    setText(element, left > 0 ? inWords(left, 2) : "over");
  }
  for (const element of $$("[data-enable-at]")) {
    if (Date.parse(element.dataset.enableAt) <= now()) {
      element.disabled = false;
      element.removeAttribute("data-enable-at");
      for (const note of $$("[data-while-disabled]")) note.hidden = true;
      announce("“It did not happen” can be chosen now.");
    }
  }
}

function announce(text) {
  const place = $("#announce");
  if (place) place.textContent = text;
}

// ---- copying, also without a secure context
async function copy(button) {
  const text = button.dataset.copy;
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "visually-hidden";
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = done ? "copied" : "press Ctrl+C";
  announce(done ? "Copied." : "Copying was refused by the browser.");
  setTimeout(() => { button.textContent = before; }, 1600);
}

// ---- the answer form
function updateAnswer(form) {
  const chosen = $("input[name=answer]:checked", form)?.value;
  const confirm = $("[data-expect]", form);
  const submit = $("[data-submit]", form);
  const needsConfirm = confirm && chosen === "did_not_happen";
  if (confirm) confirm.required = Boolean(needsConfirm);
  if (submit) {
    const label = $(`input[value="${chosen}"]`, form)?.dataset.submitLabel;
    if (label) setText(submit, label);
    submit.disabled = !chosen || Boolean(needsConfirm && confirm.value.trim() !== confirm.dataset.expect);
    submit.classList.toggle("risky", chosen === "did_not_happen");
    submit.classList.toggle("primary", chosen !== "did_not_happen");
  }
}

async function fetchResult(button) {
  const form = button.closest("form");
  const field = $("[name=external_id]", form);
  const place = $("#fetched");
  if (!field.value.trim()) {
    field.focus();
    return;
  }
  button.disabled = true;
  setText(place, "Asking the outside system …");
  try {
    const body = new FormData(form);
    const answer = await fetch(button.dataset.fetch, { method: "POST", body, headers: { Accept: "text/html" } });
    place.innerHTML = ""; // the answer is our own, escaped page
    const found = new DOMParser().parseFromString(await answer.text(), "text/html").body;
    place.append(...found.childNodes);
  } catch {
    setText(place, "The console did not answer. Nothing was changed.");
  }
  button.disabled = false;
}

// ---- drafts: what was typed survives a reload of the page, in this tab
function draftKey(form) {
  return `draft ${location.pathname} ${form.dataset.draft}`;
}
function keepDraft(form) {
  const kept = {};
  for (const field of $$("textarea, input[type=text]", form)) if (field.name && field.value) kept[field.name] = field.value;
  if (Object.keys(kept).length) sessionStorage.setItem(draftKey(form), JSON.stringify(kept));
  else sessionStorage.removeItem(draftKey(form));
}
function restoreDrafts(root) {
  for (const form of $$("form[data-draft]", root)) {
    let kept = {};
    try {
      kept = JSON.parse(sessionStorage.getItem(draftKey(form)) ?? "{}");
    } catch { /* a damaged draft is none */ }
    for (const [name, value] of Object.entries(kept)) {
      const field = form.elements.namedItem(name);
      if (field && "value" in field && !field.value) field.value = value;
    }
  }
}

// ---- rows, cursor and selection
const rows = () => $$("[data-row]");
let cursor = -1;

function moveTo(index) {
  const all = rows();
  if (!all.length) return;
  cursor = Math.max(0, Math.min(all.length - 1, index));
  for (const row of all) row.classList.remove("cursor");
  const row = all[cursor];
  row.classList.add("cursor");
  const link = $("a[data-open]", row) ?? $("a", row);
  link?.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
}

const selectionKey = () => `selected ${document.body.dataset.selection ?? location.pathname}`;
function selection() {
  try {
    return new Set(JSON.parse(sessionStorage.getItem(selectionKey()) ?? "[]"));
  } catch {
    return new Set();
  }
}
function saveSelection(chosen) {
  sessionStorage.setItem(selectionKey(), JSON.stringify([...chosen]));
}
function showSelection() {
  const bar = $("[data-bulk-bar]");
  const chosen = selection();
  for (const box of $$("input[data-select]")) box.checked = chosen.has(box.value);
  if (!bar) return;
  bar.hidden = chosen.size === 0;
  setText($("[data-bulk-count]", bar), `${chosen.size} selected`);
  const place = $("[data-bulk-ids]", bar);
  const onPage = new Set($$("input[data-select]").map((box) => box.value));
  place.replaceChildren(...[...chosen].filter((id) => !onPage.has(id)).map((id) => {
    const field = document.createElement("input");
    Object.assign(field, { type: "hidden", name: "ids", value: id });
    return field;
  }));
}

// ---- the pane: a question opens beside the list without a reload
async function openInPane(link, keepFocus) {
  const pane = $("#pane");
  const answer = await fetch(link.href, { headers: { Accept: "text/html" } });
  if (!answer.ok || answer.redirected) {
    location.assign(link.href);
    return;
  }
  const found = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = $("#pane", found);
  if (!fresh) {
    location.assign(link.href);
    return;
  }
  pane.replaceChildren(...fresh.childNodes);
  pane.scrollTop = 0;
  $$(".message").forEach((message) => message.remove());
  document.title = found.title;
  document.body.className = found.body.className;
  history.pushState({ pane: true }, "", link.href);
  markHere();
  prepare(pane);
  announce($("h1, h2", pane)?.textContent ?? "");
  if (!keepFocus) $("h1", pane)?.focus?.();
}

function markHere() {
  for (const row of rows()) {
    const link = $("a[data-open]", row);
    const isHere = Boolean(link) && new URL(link.href).pathname === location.pathname;
    row.classList.toggle("here", isHere);
    if (link) isHere ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }
}

// ---- live
const live = { source: null, failures: 0, timer: 0, again: 0, isPaused: false, isBusy: false, isDirty: false, pending: null };

function showState(state) {
  const button = $("#live");
  if (!button) return;
  button.hidden = false;
  button.dataset.state = state;
  setText($(".live-text", button), state);
  button.setAttribute("aria-label", state === "paused" ? "Live updates are paused. Continue" : `Updates: ${state}. Pause`);
}

function stopLive() {
  live.source?.close();
  live.source = null;
  clearInterval(live.timer);
  clearTimeout(live.again);
}

function startLive() {
  stopLive();
  if (live.isPaused || document.hidden || !document.body.dataset.stream) return;
  if (live.failures >= STREAM_FAILURES || !("EventSource" in window)) {
    startPolling();
    return;
  }
  const source = new EventSource(document.body.dataset.stream);
  live.source = source;
  // what changed between the answer with this page and the beginning of the stream is in neither
  source.onopen = () => { live.failures = 0; showState("live"); refresh(); };
  for (const kind of ["message", "attention", "workflow", "mutation", "mark", "reset"]) source.addEventListener(kind, refresh);
  live.timer = setInterval(refresh, CHECK_EVERY); // a proxy may swallow events of a stream that stays open
  source.onerror = () => {
    live.failures += 1;
    if (live.failures >= STREAM_FAILURES || source.readyState === EventSource.CLOSED) startLive();
    else showState("lost");
  };
}

function startPolling() {
  showState("polling");
  live.timer = setInterval(refresh, POLL_EVERY);
  live.again = setTimeout(() => { live.failures = 0; startLive(); }, STREAM_AGAIN);
}

async function refresh() {
  if (live.isBusy) {
    live.isDirty = true;
    return;
  }
  live.isBusy = true;
  try {
    do {
      live.isDirty = false;
      const answer = await fetch(location.href, { headers: { Accept: "text/html", "X-Live": "1" } });
      if (answer.ok) apply(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } while (live.isDirty);
  } catch { /* the next one comes */ }
  live.isBusy = false;
}

function apply(found) {
  document.title = found.title;
  const icon = $("#favicon", found);
  if (icon) $("#favicon").href = icon.getAttribute("href");
  for (const region of $$("[data-live]")) {
    const fresh = region.id && found.getElementById(region.id);
    if (!fresh) continue;
    if (region.dataset.live === "rows") applyRows(region, fresh);
    else if (region.innerHTML !== fresh.innerHTML && !region.contains(document.activeElement)) {
      region.replaceChildren(...fresh.childNodes);
    }
  }
  const stale = $("[data-state-token]");
  const freshToken = $("[data-state-token]", found);
  if (stale && freshToken && stale.dataset.stateToken !== freshToken.dataset.stateToken) {
    $("#changed").hidden = false;
    announce("This changed since you opened it.");
  }
  showSelection();
  tick();
}

/* Rows that are here are changed in place, rows that went stay crossed out, new rows wait for a click. */
function applyRows(region, fresh) {
  const freshRows = new Map($$("[data-row]", fresh).map((row) => [row.id, row]));
  const known = new Set();
  for (const row of $$("[data-row]", region)) {
    known.add(row.id);
    const next = freshRows.get(row.id);
    row.classList.toggle("gone", !next);
    const status = $("[data-gone]", row);
    if (status) status.hidden = Boolean(next);
    if (!next) continue;
    const about = $(".about", row);
    const nextAbout = $(".about", next);
    if (about && nextAbout && about.innerHTML !== nextAbout.innerHTML && !row.contains(document.activeElement)) {
      about.replaceChildren(...nextAbout.childNodes);
    }
  }
  for (const group of $$(".group[id]", region)) { // its count grows although it lists the first ones only
    const next = $$(".group[id]", fresh).find((each) => each.id === group.id);
    if (next && next.innerHTML !== group.innerHTML && !group.contains(document.activeElement)) {
      group.replaceChildren(...[...next.childNodes].map((node) => node.cloneNode(true)));
    }
  }
  const added = [...freshRows.keys()].filter((id) => !known.has(id)).length;
  live.pending = added ? fresh : null;
  const bar = $("#new-bar");
  if (!bar) return;
  const text = `${added} new, show`;
  if (added && (bar.hidden || $("button", bar).textContent !== text)) announce(`${added} new in the list.`);
  bar.hidden = !added;
  setText($("button", bar), text);
}

function showNew() {
  const region = $("[data-live=rows]");
  if (!live.pending || !region) return;
  region.replaceChildren(...live.pending.childNodes);
  live.pending = null;
  $("#new-bar").hidden = true;
  cursor = -1;
  markHere();
  prepare(region);
  showSelection();
  $("#list-title")?.focus();
}

async function showWatchers() {
  const place = $("[data-watchers]");
  if (!place || document.hidden) return;
  try {
    const answer = await fetch(place.dataset.watchers, { headers: { Accept: "text/html" } });
    if (answer.ok) setText(place, (await answer.text()).trim());
  } catch { /* the next one comes */ }
}

function pause() {
  live.isPaused = !live.isPaused;
  if (live.isPaused) {
    stopLive();
    showState("paused");
    announce("Live updates are paused.");
  } else {
    live.failures = 0;
    startLive();
    refresh();
    announce("Live updates continue.");
  }
}

// ---- everything on a page or in a fresh part of it
function prepare(root) {
  for (const element of $$("[data-needs-script]", root)) element.hidden = false;
  restoreDrafts(root);
  for (const form of $$("form.resolve", root)) updateAnswer(form);
  tick();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.copy !== undefined) copy(button);
  else if (button?.dataset.fetch) fetchResult(button);
  else if (button?.id === "live") pause();
  else if (button?.id === "show-keys") $("#keys").showModal();
  else if (button?.closest("#new-bar")) showNew();
  else if (button?.dataset.clearSelection !== undefined) {
    saveSelection(new Set());
    showSelection();
  } else if (button?.dataset.selectIds) {
    const chosen = selection();
    button.dataset.selectIds.split(" ").forEach((id) => chosen.add(id));
    saveSelection(chosen);
    showSelection();
  }
  const link = event.target.closest("a[data-open]");
  const isPlain = !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0;
  if (link && isPlain && $("#pane") && getComputedStyle($("#pane")).display !== "none" && $(".inbox-list")) {
    event.preventDefault();
    cursor = rows().indexOf(link.closest("[data-row]"));
    openInPane(link, event.detail === 0 ? false : true);
  }
  for (const menu of $$("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

document.addEventListener("change", (event) => {
  if (event.target.matches("input[data-select]")) {
    const chosen = selection();
    event.target.checked ? chosen.add(event.target.value) : chosen.delete(event.target.value);
    saveSelection(chosen);
    showSelection();
  }
  const form = event.target.closest("form.resolve");
  if (form) updateAnswer(form);
  if (event.target.matches("[data-auto-submit]")) event.target.form.requestSubmit();
});

document.addEventListener("input", (event) => {
  const form = event.target.closest("form");
  if (form?.classList.contains("resolve")) updateAnswer(form);
  if (form?.dataset.draft) keepDraft(form);
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.draft) sessionStorage.removeItem(draftKey(form));
  if (form.matches("[data-bulk-form]")) saveSelection(new Set());
});

const KEYS = {
  j: () => moveTo(cursor + 1),
  k: () => moveTo(cursor - 1),
  o: () => $("a[data-open]", rows()[cursor] ?? document)?.click(),
  x: () => $("input[data-select]", rows()[cursor] ?? document.createElement("i"))?.click(),
  e: () => {
    const place = $("#pane input[name=answer]:not(:disabled)") ?? $("#pane form textarea, #pane form input:not([type=hidden])");
    place ? place.focus() : $("a[data-open]", rows()[cursor] ?? document)?.click();
  },
  n: showNew,
  p: pause,
  "/": () => { $("#q")?.focus(); $("#q")?.select(); },
  "?": () => $("#keys")?.showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (isTyping(event.target)) event.target.blur();
    for (const menu of $$("details.menu[open]")) menu.open = false;
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || $("dialog[open]")) return;
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

window.addEventListener("popstate", () => location.reload());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stopLive();
    return;
  }
  if (!live.isPaused) {
    startLive();
    refresh();
  }
});

$("#show-keys")?.removeAttribute("hidden");
cursor = rows().findIndex((row) => row.classList.contains("here"));
prepare(document);
showSelection();
$(".message.error, .message.done")?.focus();
if (document.body.dataset.stream) startLive();
setInterval(tick, TICK);
setInterval(showWatchers, WATCH_EVERY);
