// A program for the Comfy API v2, by its official SDK, which knows nothing of us. It prints what it saw as JSON:
//   COMFY_BASE_URL=... COMFY_API_KEY=... node client.mjs draw|cancel|refuse|lose [FILE...]
import { randomUUID } from "node:crypto";
import { Comfy } from "@comfyorg/sdk";
import { ComfyLow } from "@comfyorg/sdk/low";

const apiKey = process.env.COMFY_API_KEY;
const comfy = new Comfy({ apiKey });

async function workflowOf(graph, photo) {
  const workflow = await comfy.workflows.fromFile(graph);
  workflow.setInput("12", "image", comfy.assets.fromFile(photo));
  return workflow;
}

async function draw(graph, photo, picture) {
  const job = await comfy.submit(await workflowOf(graph, photo));
  const events = [];
  for await (const event of job.events()) events.push(event);
  const [output] = (await job.result()).getOutputs("9");
  await output.toFile(picture);
  return {
    id: job.id,
    kinds: [...new Set(events.map((event) => event.kind))].sort(),
    values: events.filter((event) => event.kind === "progress").map((event) => event.value),
    end: events.at(-1).status,
    output: [output.id, output.name, output.type, output.sizeBytes],
    format: (await job.getWorkflow()).format,
  };
}

async function cancel(graph, photo) {
  const job = await comfy.submit(await workflowOf(graph, photo));
  let end;
  for await (const event of job.events()) {
    if (event.kind === "progress") await job.cancel();
    end = event.status;
  }
  return { id: job.id, end };
}

async function refuse(graph) {
  const low = new ComfyLow(process.env.COMFY_BASE_URL, apiKey);
  const told = (attempt) => attempt.then(() => null, (error) => [error.constructor.name, error.code, error.httpStatus]);
  return {
    unknown: await told(comfy.jobs.get(randomUUID())),
    nobody: await told(new Comfy({ apiKey: "gf_none" }).jobs.get(randomUUID())),
    missing: await told(comfy.run(await comfy.workflows.fromFile(graph))),
    // The SDK itself keeps such a workflow back: this is what the server says to it.
    editor: await told(low.postJobs({ nodes: [], links: [], last_node_id: 1 })),
  };
}

async function lose(graph, photo) {
  const deaf = async (...request) => {
    await fetch(...request);
    throw new TypeError("fetch failed");
  };
  const workflow = await workflowOf(graph, photo);
  const idempotencyKey = randomUUID();
  const lost = await new Comfy({ apiKey, fetch: deaf })
    .submit(workflow, { idempotencyKey })
    .catch((error) => error.message);
  return { lost, id: (await comfy.submit(workflow, { idempotencyKey })).id };
}

const [scenario, ...files] = process.argv.slice(2);
console.log(JSON.stringify(await { draw, cancel, refuse, lose }[scenario](...files)));
