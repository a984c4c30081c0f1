//! Number formats, quantized block layouts, tensors, [`Backend`], the operations that a device offers, and
//! [`Communicator`], by which several ranks compute one model.
//!
//! This crate depends on no other crate of the project. Devices (`cpu`, `cuda`) implement [`Backend`]; `model` calls
//! it.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod backend;
mod bytes;
mod communicator;
mod dtype;
pub mod quant;
mod rounding;
mod tensor;

pub use backend::{
    Activation, Attend, Attention, Backend, BidirectionalAttention, DeltaNet, DeltaNetShape, DigestTicket, Error,
    ExpertMlp, Extension, GatedMlp, GatedMlpCall, HeadShape, HostFloats, HostWeight, Input, KvLayer, Linear, Mamba2,
    Mamba2Shape, Output, Pending, PlainMlp, Residual, RmsNorm, Rope, RopeStyle, RotateAndStore, Routing, RowDigest,
    RowQuery, Scoring, SequenceSpan, ShortConvolution, Shortlist, StateSave, StateSpan, StepIndex, StepMemo, StoreKv,
    TableRows, TokenSlots, TokenSource, ValueHeadOrder, Values,
};
pub use bytes::{BytesOwner, SharedBytes};
pub use communicator::{Communicator, InProcess, Patience};
pub use dtype::DType;
pub use rounding::RoundedGroups;
pub use tensor::{Memory, Tensor};
