// The public names of the package.
export { Code } from "@connectrpc/connect";

export { AnswerStream, type AnswerPart, type CompletedChoice, type Completion } from "./answer.js";
export { QuartetClient } from "./client.js";
export type { TlsOptions } from "./connection.js";
export { QuartetError } from "./errors.js";
export { FinishReason } from "./gen/quartet/v1/types_pb.js";
export type {
  Chat,
  ChatMessage,
  GenerateOptions,
  Media,
  OutputOptions,
  Prompt,
  Sampling,
  TextOptions,
  Tool,
  ToolCall,
} from "./request.js";
export type { Session } from "./session.js";
