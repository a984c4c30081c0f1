//! Serves many requests in one loop: token ids in, token ids out. It knows no text and no device.
//!
//! Read [`Engine::step`] first: admit, schedule, run, commit. It uses the [`scheduler`] (pure functions), the
//! [`kv_cache`] (which sequence holds which block) and beam search. [`EngineHandle`] runs the loop on its own thread.

#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod beam;
mod buffered_sink;
mod clock;
mod embedding;
mod engine;
mod error;
mod event;
pub mod fallible;
mod handle;
pub mod kv_cache;
mod memory_plan;
mod probe;
mod queue;
mod request;
mod request_limits;
pub mod scheduler;
mod sequence;
mod sequence_group;
pub mod speculation;
mod stats;

pub use beam::{Beam, BeamParams, EarlyStopping};
pub use clock::{Clock, SystemClock};
pub use embedding::{EmbeddingHandle, EmbeddingInput, EmbeddingStats, EmbeddingTicket, Embeddings};
pub use engine::{Engine, EngineOptions, Overcommit, WindowNeed, state_need, window_need};
pub use error::Error;
pub use event::{Control, Event, EventSink, FinishReason, TokenEvent};
pub use handle::{EngineHandle, Liveness, TokenStream};
pub use kv_cache::{MissReason, PrefixDifference, PrefixMiss, Scope, TenantId, TenantUsage};
pub use memory_plan::{ContextDoesNotFit, KvBudget, KvNeed, MemoryPlan, WindowBytes};
pub use probe::{AttentionMap, AttentionProbe, MAX_PROBE_POSITIONS, MAX_PROBE_ROWS, Probe, ProbeRequest};
pub use request::{MAX_WIDTH, Request};
pub use request_limits::RequestLimits;
pub use sequence::{MAX_PERIOD, Repetition};
pub use speculation::{
    DraftContext, DraftCounts, DraftModel, DraftModelOptions, Drafter, DrafterKind, MAX_DRAFT_LEN, Proposal,
    SpeculationOptions, SpeculationStats, WantedDraft,
};
pub use stats::{EngineStats, GAP_BOUNDS_S, GapHistogram, RequestStats};

// Types of the crate below that appear in this crate's interface.
pub use pellucid_model::{EmbedderInfo, Pooling};
