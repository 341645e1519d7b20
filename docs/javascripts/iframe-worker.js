/* Browsers start no worker for pages opened from the file system. There, run the search worker in a
   hidden frame instead, so that the site needs neither a server nor a network. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      frame.contentDocument.open() // else Firefox replaces the document once it has loaded
      frame.contentDocument.write("<body>")
      frame.contentDocument.close()
      this.scope = frame.contentWindow
      this.ready = new Promise((resolve) => {
        this.scope.importScripts = (...urls) =>
          urls.reduce((before, each) => before.then(() => load(frame, each)), Promise.resolve())
        this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        load(frame, url).then(resolve)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.scope.frameElement.remove()
    }
  }
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      frame.contentDocument.body.appendChild(script)
    })
}
