#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod builder;
mod device;
mod error;
mod kv_type;
mod loading;
mod model;

pub use builder::{Builder, Loaded, ModelInfo};
pub use device::{Device, DeviceError, DeviceOptions};
pub use error::Error;
pub use kv_type::KvType;
pub use loading::{LoadEvent, load_decoder, plan_kv_memory};
pub use model::Pellucid;

pub use pellucid_cpu::Isa;
pub use pellucid_engine::{EngineStats, MemoryPlan, Overcommit, TenantId};
