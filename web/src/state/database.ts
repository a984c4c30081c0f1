// Conversations in the browser's IndexedDB, and the recordings of their replies apart from them: a recording is large
// and only the inspector reads it.

import type { Conversation, Recording } from "./conversation";

const NAME = "pellucid";
const CONVERSATIONS = "conversations";
const RECORDINGS = "recordings";

let opened: Promise<IDBDatabase> | null = null;

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(CONVERSATIONS);
      request.result.createObjectStore(RECORDINGS);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run<T>(store: string, mode: IDBTransactionMode, work: (s: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const database = await open();
  return new Promise((resolve, reject) => {
    const request = work(database.transaction(store, mode).objectStore(store));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const database = {
  conversations: (): Promise<Conversation[]> =>
    run(CONVERSATIONS, "readonly", (store) => store.getAll() as IDBRequest<Conversation[]>),
  save: (conversation: Conversation): Promise<unknown> =>
    run(CONVERSATIONS, "readwrite", (store) => store.put(conversation, conversation.id)),
  async remove(conversation: Conversation): Promise<void> {
    await run(CONVERSATIONS, "readwrite", (store) => store.delete(conversation.id));
    for (const id of Object.keys(conversation.nodes)) {
      await run(RECORDINGS, "readwrite", (store) => store.delete(id));
    }
  },
  recording: (node: string): Promise<Recording | undefined> =>
    run(RECORDINGS, "readonly", (store) => store.get(node) as IDBRequest<Recording | undefined>),
  saveRecording: (node: string, recording: Recording): Promise<unknown> =>
    run(RECORDINGS, "readwrite", (store) => store.put(recording, node)),
};
