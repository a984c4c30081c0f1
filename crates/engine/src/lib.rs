//! Many requests, one loop: ids in, ids out. Text lives in `tokenizer` and in the program; devices are chosen by the program.
//!
//! Read [`engine`](Engine) first: admit, schedule, run, commit. Around it stand the scheduler (pure), the KV cache (bookkeeping of blocks),
//! beam search, and the handle that puts the loop on a thread of its own.

mod beam;
mod engine;
mod error;
mod event;
mod handle;
mod job;
pub mod kv_cache;
mod memory_plan;
mod outbox;
mod request;
mod rules;
pub mod scheduler;
mod stats;

pub use beam::{Beam, BeamParams, EarlyStopping};
pub use engine::{Engine, EngineOptions, Overcommit};
pub use error::Error;
pub use event::{Control, Event, EventSink, FinishReason, TokenEvent};
pub use handle::{EngineHandle, Liveness, TokenStream};
pub use kv_cache::{Scope, TenantId};
pub use memory_plan::{ContextDoesNotFit, KvBudget, KvNeed, MemoryPlan};
pub use request::{MAX_WIDTH, Request};
pub use rules::Rules;
pub use stats::{EngineStats, RequestStats};
