// A job under way: its page follows it by the event stream, and by looking again and again where there is none.

const story = document.getElementById("story");
const { fragment, events } = story.dataset;
let stream;
let preview = "";
let news = false;
let stir = () => {};

function wake() {
  news = true;
  stir();
}

async function nap() {
  const streaming = stream?.readyState === EventSource.OPEN;
  const pause = streaming ? 15_000 : document.hidden ? 5_000 : 1_000;
  if (!news) await new Promise((resolve) => { stir = resolve; setTimeout(resolve, pause); });
  news = false;
}

async function follow() {
  for (;;) {
    await nap();
    try {
      const response = await fetch(fragment);
      // Logged out, or deleted in another window: the page itself says so best.
      if (response.redirected || response.status === 404) return location.reload();
      if (response.ok && show(await response.text())) break;
    } catch {
      // The network is away; the next look may find it again.
    }
  }
  stream?.close();
}

let shown = "";

// Returns whether the job has ended.
function show(html) {
  if (html === shown) return false;
  shown = html;
  const focused = story.contains(document.activeElement) ? document.activeElement.id : null;
  story.innerHTML = html;
  story.dispatchEvent(new Event("shown", { bubbles: true }));
  const { announce, percent, final } = story.querySelector(".status").dataset;
  const announcer = document.getElementById("announcer");
  if (announcer.textContent !== announce) announcer.textContent = announce;
  showTitle(percent);
  showPreview();
  if (focused !== null) (document.getElementById(focused) || document.getElementById("title")).focus();
  return final !== undefined;
}

function showTitle(percent) {
  const done = percent === undefined ? "" : `${percent} % · `;
  document.title = `${done}${document.getElementById("title").textContent} · genflow`;
}

function showPreview() {
  const image = document.getElementById("preview");
  if (!image || !preview) return;
  image.src = preview;
  image.hidden = false;
}

function showProgress({ value, step, steps }) {
  const bar = document.getElementById("progress");
  if (!bar || typeof value !== "number") return;
  const percent = Math.round(100 * value);
  bar.value = percent;
  document.getElementById("percent").textContent = `${percent} %`;
  document.getElementById("sampling").textContent = step ? `Step ${step} of ${steps}` : "";
  showTitle(percent);
}

// Not while nobody looks: a browser has few connections for one site. It is looked at now and then all the same.
function listen() {
  stream?.close();
  if (document.hidden) return;
  stream = new EventSource(events);
  stream.addEventListener("open", wake);
  stream.addEventListener("status", wake);
  stream.addEventListener("output", wake);
  stream.addEventListener("progress", ({ data }) => showProgress(JSON.parse(data)));
  stream.addEventListener("preview", ({ data }) => {
    const { content_type, data_base64 } = JSON.parse(data);
    preview = `data:${content_type};base64,${data_base64}`;
    showPreview();
  });
}

if (fragment) {
  listen();
  document.addEventListener("visibilitychange", () => { listen(); wake(); });
  follow();
}
