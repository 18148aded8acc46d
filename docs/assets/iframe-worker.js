// Browsers start no Worker from a file:// address. Run its script in a hidden frame instead, so that search works there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.scope = new Promise((resolve, reject) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        document.body.append(frame);
        const scope = frame.contentWindow;
        scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = scope.document.createElement("script");
        script.onload = () => resolve(scope);
        script.onerror = reject;
        script.src = new URL(address, document.baseURI);
        scope.document.head.append(script);
      });
    }

    async postMessage(data) {
      const scope = await this.scope;
      scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
