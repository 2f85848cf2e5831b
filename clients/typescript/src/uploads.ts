// Messages on their way up a stream.

/** Messages in order, for one reader, until `end`. */
export class Uploads<MessageT> implements AsyncIterable<MessageT> {
  readonly #messages: MessageT[] = [];
  #isEnded = false;
  #wake: () => void = () => {};

  /** Adds a message; it is dropped after the end. */
  push(message: MessageT): void {
    if (!this.#isEnded) {
      this.#messages.push(message);
      this.#wake();
    }
  }

  /** Half-closes the stream behind the messages that are still to go up. */
  end(): void {
    this.#isEnded = true;
    this.#wake();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<MessageT, void, undefined> {
    for (;;) {
      let message: MessageT | undefined;
      while ((message = this.#messages.shift()) !== undefined) {
        yield message;
      }
      if (this.#isEnded) {
        return;
      }
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}
