// OpenAI's, Ollama's and Vercel's JavaScript libraries: chats, streams, vectors, errors.
import assert from "node:assert";
import OpenAI from "openai";
import { Ollama } from "ollama";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, embed } from "ai";

const base = process.env.HEPTI_GATEWAY;
const messages = [{ role: "user", content: "the room" }];

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const whole = await openai.chat.completions.create({ model: "talker", messages, max_tokens: 6, temperature: 0 });
let text = "";
for await (const part of await openai.chat.completions.create({ model: "talker", messages, max_tokens: 6, temperature: 0, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
assert.equal((await openai.embeddings.create({ model: "vectors", input: ["the room"] })).data.length, 1);
await assert.rejects(openai.chat.completions.create({ model: "talker", messages, n: 2 }), { status: 400, param: "n" });

const ollama = new Ollama({ host: base });
assert((await ollama.list()).models.length > 1);
assert((await ollama.show({ model: "talker" })).capabilities.includes("completion"));
assert((await ollama.chat({ model: "talker", messages, options: { num_predict: 6 } })).done);
let lines = "";
for await (const part of await ollama.chat({ model: "talker", messages, stream: true, options: { num_predict: 6 } }))
  lines += part.message.content;
assert.equal(typeof lines, "string");
await assert.rejects(ollama.chat({ model: "nobody", messages }), /nobody/);

const hepti = createOpenAICompatible({ name: "hepti", baseURL: `${base}/v1` });
const one = await generateText({ model: hepti("talker"), messages, maxOutputTokens: 6, temperature: 0, maxRetries: 0 });
assert.equal(one.text, text);
let streamed = "";
for await (const part of streamText({ model: hepti("talker"), messages, maxOutputTokens: 6, temperature: 0, maxRetries: 0 }).textStream)
  streamed += part;
assert.equal(streamed, text);
assert((await embed({ model: hepti.textEmbeddingModel("vectors"), value: "the room" })).embedding.length > 8);
console.log("ok");
