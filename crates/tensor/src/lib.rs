//! What numbers are: the formats, the quantized block layouts, tensors, and the operations that a device offers.
//!
//! This crate depends on no other room. Devices (`cpu`, `cuda`) implement [`Backend`]; `model` calls it.

mod backend;
mod bytes;
mod dtype;
pub mod quant;
mod tensor;

pub use backend::{
    Activation, Attend, Attention, Backend, CHOSEN, DigestTicket, Error, ExpertMlp, GatedMlp, HeadShape, HostFloats,
    HostWeight, Input, KvLayer, Linear, Rope, RopeStyle, Routing, RowDigest, RowQuery, SequenceSpan, Shortlist,
    StepIndex, StepMemo, StoreKv, TurnAndStore,
};
pub use bytes::{BytesOwner, SharedBytes};
pub use dtype::DType;
pub use tensor::{Memory, Tensor};
