// Does what a test of a running fleet says, and prints what came as JSON. See tests/e2e/test_typescript_client.py.
//     node dist/tests/live.js complete ADDRESS REQUESTS [TLS]     all at once, an array of results
//     node dist/tests/live.js stop ADDRESS HOW [TLS]              one that would go on for long, ended once a line comes
// REQUESTS: a JSON array of {path, prompt, options}. A part {file} of a message is read here. HOW: {path, by}.
import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";

import { Code, FinishReason, QuartetClient, QuartetError } from "quartet-client";
import type { AnswerStream, Chat, GenerateOptions, Media, Prompt, Session, TlsOptions } from "quartet-client";

interface Request {
  path: "generate" | "session";
  prompt: Prompt;
  options?: GenerateOptions;
}

const PARTS_BEFORE_STOP = 5;

const [command, address = "", argument = "", tlsFiles] = process.argv.slice(2);
const client = new QuartetClient(address, tlsFiles === undefined ? {} : { tls: await readTls(tlsFiles) });
const session = client.session();
if (command === "complete") {
  const requests = JSON.parse(argument) as Request[];
  print(await Promise.all(requests.map(complete)));
} else {
  await stop(JSON.parse(argument) as { path: Request["path"]; by: "abort" | "cancel" | "leave" });
}
client.close();

async function complete({ path, prompt, options }: Request): Promise<unknown> {
  try {
    const completion = await runner(path).complete(await withFiles(prompt), options);
    const [choice] = completion.choices;
    return { text: completion.text, tokenIds: choice?.tokenIds, reason: choice && FinishReason[choice.finished.reason] };
  } catch (error) {
    return shown(error);
  }
}

/** Prints `running`, ends the request once a line comes, prints how it ended, and waits for the end of stdin. */
async function stop({ path, by }: { path: Request["path"]; by: "abort" | "cancel" | "leave" }): Promise<void> {
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const aborting = new AbortController();
  const sampling = { temperature: 0, maxTokens: 4000, ignoreEos: true };
  const answer = runner(path).generate("Once upon a time", { sampling, signal: aborting.signal });
  for (let count = 0; count < PARTS_BEFORE_STOP; count++) {
    await answer.next();
  }
  print("running");
  await lines.next();
  if (by === "leave") {
    await answer.return();
  } else {
    by === "abort" ? aborting.abort() : answer.cancel();
  }
  print(await rest(answer));
  while (!(await lines.next()).done);
}

/** How it ends: the reason of its end, or the error. */
async function rest(answer: AnswerStream): Promise<unknown> {
  let reason = "none";
  try {
    for await (const part of answer) {
      reason = part.case === "finished" ? FinishReason[part.value.reason] : reason;
    }
    return { reason };
  } catch (error) {
    return shown(error);
  }
}

function runner(path: Request["path"]): QuartetClient | Session {
  return path === "session" ? session : client;
}

async function withFiles(prompt: Prompt): Promise<Prompt> {
  if (typeof prompt === "string" || "tokenIds" in prompt) {
    return prompt;
  }
  return { ...prompt, messages: await Promise.all(prompt.messages.map(withPictures)) };
}

async function withPictures(message: Chat["messages"][number]): Promise<Chat["messages"][number]> {
  if (typeof message.content !== "object") {
    return message;
  }
  const read = async (part: string | Media | { file: string }): Promise<string | Media> =>
    typeof part === "object" && "file" in part ? readFile(part.file) : part;
  return { ...message, content: await Promise.all(message.content.map(read)) };
}

async function readTls(files: string): Promise<TlsOptions> {
  const named = Object.entries(JSON.parse(files) as Record<string, string>);
  return Object.fromEntries(await Promise.all(named.map(async ([name, file]) => [name, await readFile(file)] as const)));
}

function shown(error: unknown): unknown {
  if (error instanceof QuartetError) {
    return { code: Code[error.code], error: error.reason, field: error.field, message: error.message };
  }
  return { error: error instanceof Error ? error.name : String(error) };
}

function print(value: unknown): void {
  console.log(JSON.stringify(value));
}
