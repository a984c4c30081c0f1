//! A weight as products read it: packed into panels of sixteen columns, or in the layout of the file.

use std::any::Any;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use pellucid_tensor::{DType, Error, HostWeight, Memory, RoundedGroups};

use crate::matmul::PANEL_COLUMNS;
use crate::matmul::quantized::panel_layout::{
    PanelLayout, QuantizedFormat, SLICE_LEN, pack_panel, with_quantized_format,
};
use crate::matmul::unquantized::UnquantizedWeight;
use crate::memory::HostMemory;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;

/// `num_columns` rows of `depth` values; each row makes one column of the result.
#[derive(Debug)]
pub(crate) struct LinearWeight {
    pub(crate) dtype: DType,
    pub(crate) num_columns: usize,
    pub(crate) depth: usize,
    pub(crate) stored: Stored,
}

#[derive(Debug)]
pub(crate) enum Stored {
    /// A quantized format with integer kernels.
    Packed(PackedWeight),
    /// F32, F16 or BF16.
    Unquantized(UnquantizedWeight),
    /// Rows in the file's format, for formats without a kernel.
    FileRows(HostMemory),
}

#[derive(Debug)]
pub(crate) struct PackedWeight {
    memory: HostMemory,
    panel_bytes: usize,
    pub(crate) num_units: usize,
    pub(crate) layout: PanelLayout,
}

impl PackedWeight {
    pub(crate) fn num_panels(&self) -> usize {
        self.memory.bytes().len() / self.panel_bytes
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.memory.bytes()[panel * self.panel_bytes..(panel + 1) * self.panel_bytes]
    }

    /// Adjacent panels.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panels(&self, panels: Range<usize>) -> &[u8] {
        &self.memory.bytes()[panels.start * self.panel_bytes..panels.end * self.panel_bytes]
    }
}

impl LinearWeight {
    /// Whether the weight's rows are decoded in every product.
    pub(crate) fn is_decoded(&self) -> bool {
        matches!(self.stored, Stored::FileRows(_))
    }

    /// How rows of x are rounded before they are multiplied.
    pub(crate) fn input_rounding(&self) -> Option<RoundedGroups> {
        match &self.stored {
            Stored::Packed(weight) => Some(RoundedGroups { len: weight.layout.group * SLICE_LEN }),
            Stored::Unquantized(_) | Stored::FileRows(_) => None,
        }
    }

    /// Number of panels; zero for a weight whose rows are decoded in every product.
    pub(crate) fn num_panels(&self) -> usize {
        match &self.stored {
            Stored::Packed(weight) => weight.num_panels(),
            Stored::Unquantized(weight) => weight.num_panels(),
            Stored::FileRows(_) => 0,
        }
    }

    /// All panels, and the bytes of one.
    pub(crate) fn panels(&self) -> (&[u8], usize) {
        match &self.stored {
            Stored::Packed(weight) => (weight.memory.bytes(), weight.panel_bytes),
            Stored::Unquantized(weight) => weight.panels(),
            Stored::FileRows(_) => (&[], 0),
        }
    }

    /// Packs a weight for its kernels, on all threads.
    pub(crate) fn new(pool: &Pool, weight: HostWeight) -> Result<Self, Error> {
        let HostWeight { dtype, rows, cols, bytes } = weight;
        let packed = with_quantized_format!(dtype, F => pack::<F>(pool, rows, cols, &bytes));
        let stored = if let Some(packed) = packed {
            Stored::Packed(packed?)
        } else if let Some(unquantized) = UnquantizedWeight::pack(pool, dtype, rows, cols, &bytes) {
            Stored::Unquantized(unquantized?)
        } else {
            Stored::FileRows(HostMemory::Mapped(bytes.clone()))
        };
        if !matches!(stored, Stored::FileRows(_)) {
            bytes.release();
        }
        Ok(LinearWeight { dtype, num_columns: rows, depth: cols, stored })
    }
}

/// Returns the bytes of `len` values of a packed weight with whole panels; `None` if the format is not packed.
pub(crate) fn packed_bytes(dtype: DType, len: usize) -> Option<u64> {
    let layout = with_quantized_format!(dtype, F => F::LAYOUT)?;
    let values_of_unit = layout.slices * SLICE_LEN * PANEL_COLUMNS;
    Some((len as u64 * layout.unit_bytes() as u64).div_ceil(values_of_unit as u64))
}

fn pack<F: QuantizedFormat>(pool: &Pool, rows: usize, cols: usize, bytes: &[u8]) -> Result<PackedWeight, Error> {
    let layout = F::LAYOUT;
    let num_units = cols.div_ceil(layout.slices * SLICE_LEN);
    let panel_bytes = num_units * layout.unit_bytes();
    let num_panels = rows.div_ceil(PANEL_COLUMNS);
    let row_bytes = F::DTYPE.bytes_for(cols).expect("rows are whole blocks");
    let mut memory = HostMemory::zeroed(num_panels * panel_bytes)?;
    memory.prefer_huge_pages();
    let panels = SharedSlice::new(memory.bytes_mut());
    pool.run(num_panels, &|panel| {
        let first = panel * PANEL_COLUMNS;
        let mut columns: [&[u8]; PANEL_COLUMNS] = [&[]; PANEL_COLUMNS];
        let columns = &mut columns[..PANEL_COLUMNS.min(rows - first)];
        for (c, column) in columns.iter_mut().enumerate() {
            *column = &bytes[(first + c) * row_bytes..(first + c + 1) * row_bytes];
        }
        // SAFETY: each task has its own panel.
        pack_panel::<F>(columns, unsafe { panels.part(panel * panel_bytes, panel_bytes) });
    });
    Ok(PackedWeight { memory, panel_bytes, num_units, layout })
}

impl Memory for LinearWeight {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_bytes_are_those_of_a_weight_with_whole_panels() {
        let pool = Pool::new(1).expect("no thread but this one");
        let (rows, cols) = (2 * PANEL_COLUMNS, 512);
        let mut num_packed = 0;
        for dtype in DType::ALL {
            let Some(expected) = packed_bytes(dtype, rows * cols) else { continue };
            let bytes = vec![0; dtype.bytes_for(rows * cols).expect("whole blocks")].into();
            let weight = LinearWeight::new(&pool, HostWeight { dtype, rows, cols, bytes }).expect("enough memory");
            assert_eq!(weight.panels().0.len() as u64, expected, "{dtype}");
            num_packed += 1;
        }
        assert!(num_packed >= 12, "only {num_packed} formats are packed");
    }
}
