"use strict";
const at = (id) => document.getElementById(id);
let messages = [];
let running = null;

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// text is never taken for HTML
function show(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  at("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

async function listModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) {
    at("status").textContent = response.status === 401 ? "This server asks for an API key." : "The server refuses.";
    return;
  }
  const { data } = await response.json();
  at("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  at("status").textContent = "";
}

// the events of a stream, each the JSON after "data: "
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(box) {
  const body = {
    model: at("model").value, messages, stream: true, stream_options: { include_usage: true },
    temperature: Number(at("temperature").value),
  };
  const begin = performance.now();
  let first = 0, pieces = 0;
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
  const response = await fetch("/v1/chat/completions", request);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    first ||= performance.now();
    if (event.choices.length) pieces += 1;
    const tokens = event.usage ? event.usage.completion_tokens : pieces;
    const seconds = (performance.now() - first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    at("status").textContent = `${tokens} tokens${speed}, the first after ${((first - begin) / 1000).toFixed(2)} s`;
    box.textContent += event.choices[0]?.delta?.content ?? "";
    box.scrollIntoView({ block: "end" });
  }
}

async function send() {
  const text = at("text").value;
  if (running || !text.trim()) return;
  const chat = messages;
  at("text").value = "";
  chat.push({ role: "user", content: text });
  show("user", text);
  const box = show("assistant", "");
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  try {
    await answer(box);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (box.textContent) chat.push({ role: "assistant", content: box.textContent });
  else { box.remove(); chat.pop(); at("text").value ||= text; }
  running = null;
  at("stop").disabled = true;
  at("send").disabled = false;
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", listModels);
at("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("messages").replaceChildren();
  at("status").textContent = "";
});
listModels();
