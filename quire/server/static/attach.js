// Pictures, videos and recordings beside a message: chosen, dropped, pasted, or spoken.

import { $, el, say } from "./dom.js";

export const RATE = 16000; // samples a second of what the microphone records
const MOST_BYTES = 64 * 2 ** 20;

/** "image" | "video" | "audio" for a media type, if it is one of `reads`; else null. */
export function kindOf(type, reads) {
  const kind = type.split("/")[0];
  return reads.includes(kind) ? kind : null;
}

/** A WAV file of one channel: samples from -1 to 1 as 16 bits. */
export function wavOf(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((one, i) => view.setUint8(at + i, one.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((one, i) => view.setInt16(44 + 2 * i, Math.round(Math.max(-1, Math.min(1, one)) * 32767), true));
  return new Blob([view.buffer], { type: "audio/wav" });
}

/** The parts of a message for its media, as the chat route takes them. */
export function mediaParts(media) {
  return media.map(({ kind, url }) => {
    if (kind !== "audio") return { type: `${kind}_url`, [`${kind}_url`]: { url } };
    const [head, data] = url.split(",");
    return { type: "input_audio", input_audio: { data, format: head.split("/")[1].split(";")[0] } };
  });
}

export class Attachments {
  /** about: what the server told. transcribes: recordings become text, nothing else is read. */
  constructor(about) {
    this.reads = about.transcribes ? ["audio"] : about.chat ? about.reads : [];
    this.items = [];
    this.recorder = null;
    if (this.reads.length) this.#wire();
  }

  /** What is to be sent now; afterwards there is nothing. */
  take() {
    const taken = this.items;
    this.items = [];
    this.#show();
    return taken;
  }

  async add(files) {
    for (const file of files) {
      const kind = kindOf(file.type, this.reads);
      const name = file.name || "recording";
      if (kind === null) this.#tell(`${name}: this model reads ${this.reads.join(" and ")}.`);
      else if (file.size > MOST_BYTES) this.#tell(`${name} is larger than ${MOST_BYTES / 2 ** 20} MiB.`);
      else this.items.push({ kind, name, url: await dataUrl(file), file });
    }
    this.#show();
  }

  #tell(text) {
    $("status").textContent = text;
    say($("attach-error"), text);
    $("attach-error").hidden = false;
  }

  #show() {
    $("attach-error").hidden = true;
    $("attached").replaceChildren(...this.items.map((item) => el("li", {}, preview(item),
      el("button", { type: "button", class: "quiet", text: "×", "aria-label": `Remove ${item.name}`, on: { click: () => this.#remove(item) } }))));
    $("attached").hidden = this.items.length === 0;
  }

  #remove(item) {
    this.items = this.items.filter((one) => one !== item);
    this.#show();
    $("say").focus();
  }

  #wire() {
    $("attach").hidden = false;
    $("attach-files").accept = this.reads.map((kind) => `${kind}/*`).join(",");
    $("attach").addEventListener("click", () => $("attach-files").click());
    $("attach-files").addEventListener("change", async () => {
      await this.add([...$("attach-files").files]);
      $("attach-files").value = "";
      $("say").focus();
    });
    $("say").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
    const box = $("composer");
    box.addEventListener("dragover", (event) => event.preventDefault());
    box.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    if (!this.reads.includes("audio") || !navigator.mediaDevices) return; // none outside https and localhost
    $("record").hidden = false;
    $("record").addEventListener("click", () => (this.recorder ? this.recorder.stop() : this.#record()));
  }

  async #record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      this.#tell("This page may not use the microphone.");
      return;
    }
    const pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
    this.recorder.addEventListener("stop", async () => {
      for (const track of stream.getTracks()) track.stop();
      this.recorder = null;
      this.#recording(false);
      const samples = await samplesOf(new Blob(pieces));
      await this.add([new File([wavOf(samples, RATE)], "recording.wav", { type: "audio/wav" })]);
    });
    this.recorder.start();
    this.#recording(true);
  }

  #recording(on) {
    $("record").setAttribute("aria-pressed", String(on));
    say($("record"), on ? "■ Recording" : "Record");
    $("status").textContent = on ? "The microphone records." : "The recording is complete.";
  }
}

/** A picture, or the name of anything else. */
export function preview({ kind, name, url }) {
  return kind === "image" ? el("img", { src: url, alt: name }) : el("span", { class: "file", text: name });
}

const dataUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/** What a browser recorded, in whatever format, as samples of one channel. */
async function samplesOf(blob) {
  const context = new OfflineAudioContext(1, 1, RATE); // decodes to this rate
  const decoded = await context.decodeAudioData(await blob.arrayBuffer());
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, i) => decoded.getChannelData(i));
  return channels[0].map((_, i) => channels.reduce((sum, one) => sum + one[i], 0) / channels.length);
}
