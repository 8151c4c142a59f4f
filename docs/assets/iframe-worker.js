// Searching in a site that is opened as a file: browsers start no Worker there, so a hidden frame takes its place.
// The theme's search looks for `IFrameWorker` and for a script of the frame with its own address.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise((resolve) => (script.onload = resolve))
      this.send = (data) => inside.dispatchEvent(new MessageEvent("message", { data }))
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.send(data))
    }
  }
  window.Worker = window.IFrameWorker
}
