"use strict";
// Names come from users and devices. They become text nodes and attributes, never markup.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let site = null;

function make(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}
const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);
const show = (id, ...children) => $(id).replaceChildren(...children.flat(Infinity));

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const number = (value, digits = 1, unit = "") => (known(value) ? value.toFixed(digits) + unit : "–");
const time = (ms) => (known(ms) ? (ms < 1000 ? number(ms, ms < 100 ? 1 : 0, " ms") : number(ms / 1000, ms < 10000 ? 2 : 1, " s")) : "–");
const percent = (value) => (known(value) ? Math.round(value * 100) + " %" : "–");
const mib = (value) => (known(value) ? Math.round(value / 2 ** 20) + " MiB" : "–");
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const median = (values) => (values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : null);
const methodOf = (plan) => [plan.strategy, ...Object.values(plan.options ?? {})].join("/");
const wait = (text) => h("p", { class: "soft" }, text);

function table(columns, rows) {
  const kinds = columns.map(([, kind]) => kind ?? "");
  return h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind ?? "" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: kinds[i] }, cell))))));
}

function bar(name, fraction, text, kind = "") {
  const fill = h("div", { class: "fill " + kind });
  fill.style.width = Math.min(Math.max(fraction, 0), 1) * 100 + "%";
  return h("div", { class: "bar-row" }, h("span", { title: name }, name), h("div", { class: "track" }, fraction > 0 ? fill : null), h("span", {}, text));
}

function picture(label, width, height, ...parts) {
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);
}

// ---- the plan

function chosen() {
  return site?.models.find((model) => model.name === $("model").value) ?? site?.models[0];
}

// The model in use: that of most requests under way, else of the last answer, else the first one with a plan.
function inUse() {
  const busiest = Object.entries(site.waiting).sort((a, b) => b[1] - a[1])[0]?.[0];
  return busiest ?? site.answers.at(-1)?.model ?? site.models.find((model) => model.active)?.name;
}

// A prediction for agents that share a machine holds for idle cores.
function onIdleCores(model, devices) {
  const hosts = devices.map((name) => model.machines?.[name]).filter(Boolean);
  return new Set(hosts).size < hosts.length ? " on idle cores" : "";
}

function drawModels() {
  const names = site.models.map((model) => model.name);
  const select = $("model");
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const before = select.value || inUse();
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
}

function drawPlan(model) {
  for (const part of ["shares", "timeline", "candidates"]) show(part);
  $("timeline-note").textContent = "";
  if (!model) return show("plan", wait("No model is served."));
  const plan = model.active;
  const lines = [];
  if (model.error) lines.push(h("p", { class: "bad" }, model.error.message));
  if (model.preparing) lines.push(h("p", {}, `Preparing ${methodOf(model.preparing)}: ` + progress(model)));
  if (!plan) return show("plan", lines.length ? lines : wait("No plan is active yet."));
  const own = site.answers.filter((answer) => answer.model === model.name && answer.plan === plan.version.join("."));
  const measured = median(own.map((answer) => answer.latency_ms));
  const predicted = median(own.map((answer) => answer.predicted_ms).filter(known)) ?? model.simulated_ms;
  show("plan", lines, h("p", { class: "method" }, methodOf(plan)), h("p", {}, plan.reason),
    h("p", { class: "facts" }, `plan ${plan.version.join(".")} · root device ${plan.root} · route ${plan.route} · wire ${plan.wire} · weights ${plan.storage} · up to ${model.in_flight} at once`));
  const most = Math.max(measured ?? 0, predicted ?? 0, 1e-9), length = model.simulated_tokens;
  const shared = onIdleCores(model, plan.devices);
  const of = own.length ? `Medians of the last ${own.length} answers.` : known(length) ? `For ${length} ${length === 1 ? "token" : "tokens"}.` : "";
  $("plan").append(bar(shared ? "on idle cores" : "predicted", (predicted ?? 0) / most, time(predicted), "predicted"),
    bar("measured", (measured ?? 0) / most, time(measured)),
    h("p", { class: "facts" }, of, shared ? " These agents share a machine's cores: times on idle cores predict nothing here." : ""));
  if (model.unknown) show("shares", wait(`Not known here: ${model.unknown}`));
  for (const [name, use] of Object.entries(model.shares ?? {})) $("shares").append(bar(name, use.share, percent(use.share)));
  if (model.timeline) drawTimeline(model);
  show("candidates", model.candidates.length ? table(
    [["plan"], ["devices", "long"], ["predicted", "number"], ["expected", "number"], ["fits"]],
    model.candidates.map((c) => [c.name, c.devices.join(", "), time(c.predicted_ms) + onIdleCores(model, c.devices), time(c.expected_ms), c.feasible ? "yes" : "no"]))
    : wait("None."));
}

function progress(model) {
  const parts = Object.entries(model.progress).map(([name, [done, all]]) => `${name} ${mib(done)} of ${mib(all)}`);
  return parts.join(", ") || "weights are on their way";
}

function drawTimeline(model) {
  const names = Object.keys(model.shares), left = 100, width = Math.max($("timeline").clientWidth - left, 120), row = 26;
  const parts = [];
  names.forEach((name, at) => {
    const y = at * (row + 8);
    parts.push(s("text", { x: left - 10, y: y + 17, "text-anchor": "end", class: "name" }, name.length > 13 ? name.slice(0, 12) + "…" : name),
      s("rect", { x: left, y, width, height: row, rx: 4, class: "lane-idle" }));
    for (const lane of model.timeline.filter((lane) => lane.device === name)) {
      const step = width / lane.busy.length, computes = lane.lane === "compute";
      lane.busy.forEach((busy, i) => {
        const height = computes ? 16 * busy : 8 * busy;
        if (busy > 0.01) parts.push(s("rect", { x: left + i * step, y: computes ? y + 17 - height : y + 18, width: step + 0.3, height, class: computes ? "lane-compute" : "lane-wire" }));
      });
    }
  });
  const height = names.length * (row + 8) + 16;
  parts.push(s("text", { x: left, y: height - 3 }, "0"), s("text", { x: left + width, y: height - 3, "text-anchor": "end" }, time(model.simulated_ms)));
  const words = Object.entries(model.shares).map(([name, use]) => `${name} computes ${time(use.compute_ms)} and waits ${time(use.wait_ms)}`);
  show("timeline", picture("Time line of one request: " + words.join("; "), left + width, height, parts));
  $("timeline-note").textContent = `of one request of ${model.simulated_tokens} ${model.simulated_tokens === 1 ? "token" : "tokens"}, simulated with the measured speeds`;
}

// ---- devices

function drawDevices() {
  const rows = site.devices.map((d) => [
    d.device,
    h("span", { class: "state " + (d.status === "online" ? "online" : d.status === "offline" ? "offline" : "") }, d.status === "starting" && d.doing ? `starting: ${d.doing}` : d.status),
    percent(d.cpu_other), known(d.rss_bytes) ? `${mib(d.rss_bytes)}` : "–", mib(d.memory_budget_bytes),
    number(d.temperature_c, 0, " °C"), number(known(d.round_trip_s) ? d.round_trip_s * 1e3 : null, 2, " ms"),
    d.unused ?? ""]);
  show("devices", rows.length ? table([["device"], ["state"], ["other load", "number"], ["memory", "number"], ["budget", "number"], ["temperature", "number"], ["round trip", "number"], ["", "long"]], rows)
    : wait("No device has joined. On each: hepti-agent --id NAME"));
  drawLinks();
}

function drawLinks() {
  const there = site.devices.filter((d) => d.status === "online").slice(0, 24);
  $("links").parentElement.hidden = there.length < 2;
  if (there.length < 2) { show("links"); show("links-table", wait("No two devices are online.")); return; }
  const place = new Map(there.map((d, i) => {
    const angle = (2 * Math.PI * i) / there.length - Math.PI / 2;
    return [d.device, [150 + 92 * Math.cos(angle), 112 + 80 * Math.sin(angle)]];
  }));
  const lines = [], rows = [], used = new Set(site.models.flatMap((m) => (m.active && m.active.devices.length > 1 ? [m.active.devices] : [])).flat());
  there.forEach((a, i) => there.slice(i + 1).forEach((b) => {
    const [x1, y1] = place.get(a.device), [x2, y2] = place.get(b.device);
    const link = a.links[b.device] ?? {}, back = b.links[a.device] ?? {};
    const direct = Boolean(link.joined || back.joined);
    const trip = link.round_trip_s ?? back.round_trip_s, rate = link.bytes_per_s ?? back.bytes_per_s;
    const way = used.has(a.device) && used.has(b.device) ? `used by the plan, ${direct ? "directly" : "through the broker"}` : "idle";
    lines.push(s("line", { x1, y1, x2, y2, class: way === "idle" ? "link relayed" : "link" }));
    rows.push([`${a.device} – ${b.device}`, way, number(known(trip) ? trip * 1e3 : null, 2, " ms"), number(known(rate) ? rate * 8e-6 : null, 0, " Mbit/s"), link.trouble || back.trouble || ""]);
  }));
  const nodes = there.map((d) => {
    const [x, y] = place.get(d.device), up = y < 112;
    return [s("circle", { cx: x, cy: y, r: 9, class: "node" + (d.unused ? " off" : "") }),
      s("text", { x, y: up ? y - 16 : y + 26, "text-anchor": "middle", class: "name" }, d.device.length > 16 ? d.device.slice(0, 15) + "…" : d.device)];
  });
  show("links", picture(`Links: ${rows.map((row) => `${row[0]} ${row[1]}`).join("; ")}`, 300, 222, lines, nodes));
  show("links-table", table([["link"], ["way"], ["round trip", "number"], ["rate", "number"], ["", "long"]], rows));
}

// ---- latency, story, errors, summary

function drawLatency(model) {
  const answers = site.answers.filter((answer) => answer.model === model?.name);
  if (!answers.length) { show("latency", wait("No request has been answered since this page's gateway started.")); show("latency-table", wait("Nothing yet.")); return; }
  const first = answers[0].time, span = Math.max(site.time - first, 30);
  const values = answers.flatMap((a) => [a.latency_ms, a.predicted_ms]).filter(known);
  const top = Math.max(...values) * 1.15, left = 64, width = Math.max($("latency").clientWidth - left - 8, 160), height = 170;
  const x = (time) => left + ((time - first) / span) * width, y = (ms) => height - (ms / top) * (height - 10);
  const parts = [0, 0.5, 1].map((part) => [s("line", { x1: left, x2: left + width, y1: y(top * part), y2: y(top * part), class: "axis" }),
    s("text", { x: left - 8, y: y(top * part) + 4, "text-anchor": "end" }, number(top * part, top < 10 ? 1 : 0, part === 1 ? " ms" : ""))]);
  const changes = model.story.filter((step) => step.to === "active" && step.time >= first);
  for (const step of changes) parts.push(s("line", { x1: x(step.time), x2: x(step.time), y1: 4, y2: height, class: "change" }, s("title", {}, `${clock(step.time)} ${step.plan}: ${step.cause}`)));
  const told = answers.filter((a) => known(a.predicted_ms) && !onIdleCores(model, model.active?.devices ?? []));
  parts.push(s("polyline", { points: told.map((a) => `${x(a.time)},${y(a.predicted_ms)}`).join(" "), class: "predicted-line" }));
  for (const a of answers) parts.push(s("circle", { cx: x(a.time), cy: y(a.latency_ms), r: 4, class: "points" }, s("title", {}, `${clock(a.time)}: ${time(a.latency_ms)}`)));
  parts.push(s("text", { x: left, y: height + 18 }, clock(first)), s("text", { x: left + width, y: height + 18, "text-anchor": "end" }, clock(first + span)));
  const label = `Latency of ${answers.length} answers, median ${time(median(answers.map((a) => a.latency_ms)))}, ${changes.length} changes of the plan`;
  show("latency", picture(label, left + width + 8, height + 24, parts));
  show("latency-table", table([["time"], ["measured", "number"], ["predicted", "number"], ["plan"]],
    answers.slice(-20).reverse().map((a) => [clock(a.time), time(a.latency_ms), time(a.predicted_ms), a.plan ?? "–"])));
}

// Equal errors are one line with their number.
function drawErrors() {
  const own = site.models.filter((m) => m.error).map((m) => ({ time: site.time, model: m.name, code: m.error.code, message: m.error.message }));
  const all = [...site.errors, ...own], groups = new Map();
  for (const e of all) {
    const key = [e.model, e.code, e.message].join("\n");
    groups.set(key, { ...e, count: (groups.get(key)?.count ?? 0) + 1 });
  }
  const lines = [...groups.values()].sort((a, b) => b.time - a.time);
  show("errors", lines.length ? h("ol", { class: "errors" }, lines.map((e) => h("li", {}, h("time", {}, clock(e.time)),
    h("b", {}, `${e.model} ${e.code} `), e.count > 1 ? h("span", { class: "soft" }, `${e.count} times `) : null, e.message ?? ""))) : wait("None."));
  return all.length;
}

function drawSummary(errors) {
  const online = site.devices.filter((d) => d.status === "online").length;
  const last = site.answers.at(-1), sum = (values) => values.reduce((a, b) => a + b, 0);
  const under = sum(Object.values(site.waiting));
  const queued = sum(site.models.map((m) => Math.max((site.waiting[m.name] ?? 0) - m.in_flight, 0)));
  const tile = (name, value, bad = false) => h("div", { class: bad ? "bad" : "" }, h("dt", {}, name), h("dd", {}, String(value)));
  show("summary", tile("devices online", `${online} of ${site.devices.length}`), tile("requests under way", under - queued), tile("queued", queued),
    known(site.tokens_per_s) ? tile("tokens per second", number(site.tokens_per_s, 1)) : tile("models", site.models.length),
    tile("last answer", last ? time(last.latency_ms) : "–"), tile("errors of the last hour", errors, errors > 0));
  return `live: ${online} of ${site.devices.length} devices online`;
}

function say(state, text) {
  if ($("state").textContent !== text) $("state").textContent = text; // a screen reader hears changes alone
  $("state").dataset.state = state;
}

function draw() {
  $("site").textContent = site.site;
  $("version").textContent = site.version;
  document.title = `Hepti ${site.site}`;
  $("key-row").hidden = !site.locked;
  $("trouble").hidden = !site.trouble;
  if ($("trouble").textContent !== (site.trouble ?? "")) $("trouble").textContent = site.trouble ?? "";
  drawModels();
  const model = chosen();
  drawPlan(model);
  drawDevices();
  drawLatency(model);
  say("live", drawSummary(drawErrors()));
  drawInputs(model?.reads);
}

// Texts and pictures for models that read either (CLIP); a message to a decoder, a recording for speech.
function drawInputs(reads) {
  $("text-row").hidden = reads === "image" || reads === "sound";
  $("picture-row").hidden = reads === "text" || reads === "chat" || reads === "sound";
  $("sound-row").hidden = reads !== "sound";
  $("record").hidden = !navigator.mediaDevices || !window.MediaRecorder;
  $("text").labels[0].textContent = reads === "chat" ? "A message" : "A text";
  $("text").placeholder = reads === "chat" ? "What is the capital of France?" : "The laundry is done.";
}

// ---- a request

function shownResult(result) {
  if (Array.isArray(result?.labels) && result.labels.every((one) => known(one?.score))) return result.labels.slice(0, 8).map((one) => bar(String(one.label), one.score, percent(one.score)));
  if (Array.isArray(result?.embedding)) return [h("p", {}, `An embedding of ${result.embedding.length} numbers`), h("pre", {}, result.embedding.slice(0, 24).map((v) => v.toFixed(4)).join("  ") + " …")];
  return [h("pre", {}, JSON.stringify(result, null, 1).slice(0, 4000))];
}

async function base64(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the picture cannot be read"));
    reader.readAsDataURL(file);
  });
  return url.slice(url.indexOf(",") + 1);
}

let recording = null, recorded = null;

async function record() {
  if (recording) return recording.stop();
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }), parts = [];
    recording = new MediaRecorder(stream);
    recording.ondataavailable = (event) => parts.push(event.data);
    recording.onstop = () => {
      recorded = new File(parts, "recording", { type: recording.mimeType });
      stream.getTracks().forEach((track) => track.stop());
      recording = null;
      $("record").textContent = "Record again";
      $("ask").requestSubmit();
    };
    recording.start();
    $("record").textContent = "Stop and send";
  } catch (error) {
    show("answer", h("p", { class: "bad" }, `no recording: ${error.message}`));
  }
}

async function send(path, body, type) {
  const headers = type ? { "Content-Type": type } : {};
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { method: "POST", headers, body });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error?.message ?? text; } catch { /* it is no JSON */ }
  throw new Error(message || `status ${response.status}`);
}

// The parts of a streamed text as they come: chats by messages, models without a chat template by a prompt.
async function chat(model, text) {
  const common = { model: model.name, stream: true, max_tokens: 256 }, begun = performance.now(), out = h("p", { class: "chat" }), facts = h("p", { class: "facts" });
  const [path, asked] = model.chats ? ["v1/chat/completions", { messages: [{ role: "user", content: text }] }] : ["v1/completions", { prompt: text }];
  const response = await send(path, JSON.stringify({ ...common, ...asked }), "application/json");
  show("answer", out, facts);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", tokens = 0, first = null;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const told = JSON.parse(line.slice(6));
      if (told.error) throw new Error(told.error.message);
      const piece = told.choices?.[0]?.delta?.content ?? told.choices?.[0]?.text ?? "";
      if (!piece) continue;
      first ??= performance.now();
      tokens += 1;
      out.append(piece);
    }
  }
  const rate = tokens > 1 ? `, then ${number(((tokens - 1) * 1000) / (performance.now() - first))} tokens per second` : "";
  facts.textContent = `first token after ${time((first ?? performance.now()) - begun)}${rate}`;
}

async function hear(model, file) {
  const form = new FormData(), begun = performance.now();
  form.append("model", model);
  form.append("file", file, file.name);
  const found = await (await send("v1/audio/transcriptions", form)).json();
  show("answer", h("p", { class: "chat" }, found.text || "No speech was heard."), h("p", { class: "facts" }, time(performance.now() - begun)));
}

async function infer(model) {
  const file = $("picture-row").hidden ? undefined : $("picture").files[0];
  const body = file ? { model, image: await base64(file) } : { model, text: $("text").value || $("text").placeholder };
  const found = await (await send("infer", JSON.stringify(body), "application/json")).json();
  const devices = Object.keys(found.plan?.devices ?? {});
  const predicted = known(found.predicted_ms) && !onIdleCores(chosen(), devices) ? `, predicted ${time(found.predicted_ms)} for ${found.tokens} tokens` : "";
  show("answer", shownResult(found.result), h("p", { class: "facts" }, `${time(found.latency_ms)}${predicted}, by ${methodOf(found.plan)} on ${devices.join(", ")}`));
}

async function ask(event) {
  event.preventDefault();
  const button = $("ask").querySelector("button[type=submit]"), model = chosen();
  button.disabled = true;
  show("answer", wait("Waiting for the answer …"));
  try {
    const sound = recorded ?? $("sound").files[0];
    if (model?.reads === "sound" && !sound) throw new Error("choose a recording, or record one");
    if (model?.reads === "chat") await chat(model, $("text").value || $("text").placeholder);
    else if (model?.reads === "sound") await hear(model.name, sound);
    else await infer(model?.name);
  } catch (error) {
    show("answer", h("p", { class: "bad" }, error.message));
  } finally {
    button.disabled = false;
    recorded = null;
  }
}

$("ask").addEventListener("submit", ask);
$("record").addEventListener("click", record);
addEventListener("resize", () => site && draw());
$("model").addEventListener("change", () => site && draw());
const events = new EventSource("events");
events.onmessage = (event) => { site = JSON.parse(event.data); draw(); };
events.onerror = () => say("lost", "connection lost, trying again");
