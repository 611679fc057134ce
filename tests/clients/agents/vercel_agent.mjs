// The Vercel SDK with each of its providers.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const { OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY } = process.env;
const models = {
  compatible: () => createOpenAICompatible({ name: "gateway", baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })("policy"),
  openai: () => createOpenAI({ baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })("policy"),
  anthropic: () => createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey: ANTHROPIC_API_KEY })("policy"),
};
const line = JSON.parse(readFileSync(0, "utf8"));
const calculator = tool({
  description: "Evaluate arithmetic.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async ({ expression }) => String(Function(`return ${expression}`)()),
});
const { text } = await generateText({
  model: models[process.argv[2]](),
  prompt: line.messages.at(-1).content,
  tools: { calculator },
  stopWhen: stepCountIs(5),
});
console.log(text);
