"use strict";

// Everything here is a convenience: each page works without it.

const POLL_MS = 1000;

function showLocalTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const date = new Date(time.dateTime);
    const style = time.closest(".status") ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "short" };
    time.textContent = date.toLocaleString(undefined, style);
  }
}

// --- the form: a preview, and one press of the button ---

function showPreview(input, image) {
  URL.revokeObjectURL(image.src);
  const file = input.files[0];
  image.hidden = !file;
  if (file) image.src = URL.createObjectURL(file);
  image.onerror = () => { image.hidden = true; };
}

function sendOnce(form) {
  const button = form.querySelector("button[type=submit]");
  const label = button.textContent;
  form.addEventListener("submit", (event) => {
    if (button.ariaDisabled === "true") {
      event.preventDefault();
      return;
    }
    button.ariaDisabled = "true";
    button.textContent = button.dataset.busy;
  });
  // The page comes back as it was left when the browser's back button is used.
  window.addEventListener("pageshow", () => {
    button.ariaDisabled = "false";
    button.textContent = label;
  });
}

// --- a job under way ---

function show(story, html) {
  const focused = story.contains(document.activeElement) ? document.activeElement.id : null;
  story.innerHTML = html;
  showLocalTimes(story);
  watchPictures(story);
  const status = story.querySelector(".status");
  const announcer = document.getElementById("announcer");
  if (announcer.textContent !== status.dataset.announce) announcer.textContent = status.dataset.announce;
  document.title = `${story.querySelector("h1").textContent} · genflow`;
  if (focused !== null) (document.getElementById(focused) || story.querySelector("h1")).focus();
  return "final" in status.dataset;
}

async function follow(story) {
  let shown = "";
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden) continue;
    try {
      const response = await fetch(story.dataset.fragment, { credentials: "same-origin" });
      // Logged out, or deleted in another window: the page itself says so best.
      if (response.redirected || response.status === 404) return location.reload();
      if (!response.ok) continue;
      const html = await response.text();
      if (html !== shown && show(story, html)) return;
      shown = html;
    } catch {
      // The network is away; the next look may find it again.
    }
  }
}

// --- pictures that are not there any more ---

function markGone(image) {
  const note = document.createElement("span");
  note.className = `${image.className} gone`;
  note.textContent = "The picture is gone";
  image.replaceWith(note);
}

function watchPictures(root) {
  for (const image of root.querySelectorAll("img[src*='/pictures/']")) {
    image.addEventListener("error", () => markGone(image));
    if (image.complete && image.currentSrc && !image.naturalWidth) markGone(image);
  }
}

showLocalTimes(document);
watchPictures(document);
for (const form of document.querySelectorAll("form[data-once]")) sendOnce(form);
const photo = document.querySelector(".photo-field input[type=file]");
if (photo) photo.addEventListener("change", () => showPreview(photo, document.querySelector(".preview")));
const story = document.querySelector("[data-fragment]");
if (story) follow(story);
