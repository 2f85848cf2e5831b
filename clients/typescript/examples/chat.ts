// Asks a chat model one question, with a picture if one is given, and prints the answer as it comes.
//     node dist/examples/chat.js ADDRESS QUESTION [PICTURE]
import { readFile } from "node:fs/promises";

import { QuartetClient, QuartetError } from "quartet-client";

const [address, question, picture] = process.argv.slice(2);
if (address === undefined || question === undefined) {
  console.error("usage: node dist/examples/chat.js ADDRESS QUESTION [PICTURE]");
  process.exit(2);
}

const client = new QuartetClient(address);
const content = picture === undefined ? question : [await readFile(picture), question];
const interrupted = new AbortController();
process.once("SIGINT", () => interrupted.abort());
try {
  const answer = client.generate(
    { messages: [{ role: "user", content }] },
    { sampling: { temperature: 0, maxTokens: 256 }, signal: interrupted.signal },
  );
  for await (const part of answer) {
    if (part.case === "delta") {
      process.stdout.write(part.value.text);
    }
  }
  process.stdout.write("\n");
} catch (error) {
  if (!(error instanceof QuartetError)) {
    throw error;
  }
  const retry = error.retryAfterMs === undefined ? "" : `; try again in ${error.retryAfterMs} ms`;
  console.error(`${error.reason || error.code}: ${error.message}${retry}`);
  process.exitCode = 1;
} finally {
  client.close();
}
