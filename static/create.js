// The form: a photo by drop, paste or camera, a look at it before it is sent, and a few helping hands.

let form, photo;

function begin() {
  form = document.getElementById("create");
  photo = form.elements.photo;
  // The way back brings the page anew, but what was sent from it is to stay one portrait.
  if (history.state?.key) form.elements.key.value = history.state.key;
  else history.replaceState({ key: form.elements.key.value }, "");
  photo.addEventListener("change", showPhoto);
  showPhoto(); // it may have been chosen before this script was there
  form.querySelector("#camera").addEventListener("click", () => {
    photo.setAttribute("capture", "user");
    photo.click();
    photo.removeAttribute("capture");
  });
  form.querySelector("#dice").addEventListener("click", () => {
    form.elements.seed.value = crypto.getRandomValues(new BigUint64Array(1))[0];
  });
  form.querySelector("#examples").addEventListener("click", ({ target }) => {
    if (!target.dataset.text) return;
    form.elements.prompt.select();
    document.execCommand("insertText", false, target.dataset.text); // so that it can be undone
  });
  form.addEventListener("input", ({ target }) => {
    const output = form.querySelector(`output[for="${target.id}"]`);
    if (output) output.value = target.value;
  });
  form.addEventListener("submit", send);
}

// --- the photo ---

function takeFrom(transfer) {
  const file = [...transfer.files].find(({ type }) => type.startsWith("image/")) ?? transfer.files[0];
  if (!file) return false;
  const one = new DataTransfer();
  one.items.add(file);
  photo.files = one.files;
  showPhoto();
  return true;
}

function showPhoto() {
  const [file] = photo.files;
  const box = form.querySelector("#photo");
  const image = box.querySelector(".preview");
  say("");
  if (!file) return;
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = "The photo you chose";
  image.onload = () => { image.hidden = false; box.classList.add("filled"); };
  image.onerror = () => { // the server may read what this browser does not
    image.hidden = true;
    box.classList.remove("filled");
    say(`Chosen: ${file.name}`);
  };
  check(file);
}

let checking = new AbortController();

async function check(file) {
  checking.abort();
  checking = new AbortController();
  const body = new FormData();
  body.append("photo", file);
  const headers = { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
  try {
    const answer = await fetch(form.dataset.check, { method: "POST", body, headers, signal: checking.signal });
    const { ok, warnings = [], face, error } = await answer.json();
    if (warnings.length) say(warnings.map(({ message }) => message).join(" "), "warn");
    else if (ok && face) say("One face, well in view.");
    else if (error && [413, 415, 422].includes(answer.status)) say(error.message, "bad");
  } catch {
    // Nobody could look at it just now. It is looked at when it is sent.
  }
}

function say(sentence, kind = "") {
  const verdict = form.querySelector("#verdict");
  verdict.textContent = sentence;
  verdict.className = `verdict ${kind}`;
  if (kind === "bad") verdict.scrollIntoView({ block: "nearest" });
}

document.addEventListener("paste", (event) => { if (takeFrom(event.clipboardData)) event.preventDefault(); });
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  form.querySelector(".drop").classList.add("over");
});
document.addEventListener("dragleave", () => form.querySelector(".drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  form.querySelector(".drop").classList.remove("over");
  takeFrom(event.dataTransfer);
});

// --- sending: whatever goes wrong, the photo stays chosen and the words written ---

async function send(event) {
  event.preventDefault();
  checking.abort(); // its word, come late, would stand in place of the answer's
  const button = event.submitter;
  try {
    const answer = await fetch(form.action, { method: "POST", body: new FormData(form) });
    if (answer.redirected) return location.assign(answer.url);
    putInPlace(await answer.text());
  } catch {
    say("That did not get through: the network is away. Nothing is lost, try again.", "bad");
  }
  button.ariaDisabled = "false";
  button.textContent = button.dataset.label;
}

function putInPlace(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  const fresh = page.getElementById("create");
  if (!fresh) return say(page.querySelector("main h1 + p").textContent, "bad");
  fresh.elements.photo.files = photo.files;
  form.replaceWith(fresh);
  begin();
  (form.querySelector(".wrong :is(input, textarea)") ?? form.querySelector("#problem")).focus();
}

begin();
