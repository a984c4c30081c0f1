//! [`HostFloats`]: host memory that a device copies values into.

use std::any::Any;
use std::fmt;

/// Memory of the host that values are read back into.
pub trait HostFloats: Send + Sync + fmt::Debug {
    fn get(&self) -> &[f32];
    fn get_mut(&mut self) -> &mut [f32];
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl HostFloats for Vec<f32> {
    fn get(&self) -> &[f32] {
        self
    }

    fn get_mut(&mut self) -> &mut [f32] {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
