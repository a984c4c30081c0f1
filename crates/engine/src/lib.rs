//! Many requests, one loop: ids in, ids out. Text lives in `tokenizer` and in the program; devices are chosen by the program.
//!
//! Read [`engine`](Engine) first: admit, schedule, run, commit. Around it stand the scheduler (pure), the KV cache (bookkeeping of blocks),
//! beam search, and the handle that puts the loop on a thread of its own.

mod beam;
mod buffered_sink;
mod engine;
mod error;
mod event;
mod handle;
pub mod kv_cache;
mod memory_plan;
mod request;
mod request_limits;
pub mod scheduler;
mod sequence;
mod sequence_group;
mod stats;

pub use beam::{Beam, BeamParams, EarlyStopping};
pub use engine::{Engine, EngineOptions, Overcommit};
pub use error::Error;
pub use event::{Control, Event, EventSink, FinishReason, TokenEvent};
pub use handle::{EngineHandle, Liveness, TokenStream};
pub use kv_cache::{Scope, TenantId};
pub use memory_plan::{ContextDoesNotFit, KvBudget, KvNeed, MemoryPlan};
pub use request::{MAX_WIDTH, Request};
pub use request_limits::RequestLimits;
pub use stats::{EngineStats, RequestStats};
