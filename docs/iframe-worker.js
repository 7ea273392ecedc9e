// The search runs in a web worker, which browsers do not start for pages that are opened from a folder. There, this class runs
// the script of the worker in a hidden frame instead. The plugin "offline" would load such a class from the network, unless a
// script with this name is listed in mkdocs.yml.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      // In a worker, postMessage answers the page; in a frame it would send the message to the frame itself.
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = () => {
        this.ready = true
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      }
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: "the search script is missing: " + url }))
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      if (this.ready) this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {
      this.scope.frameElement.remove()
    }
  }
}
