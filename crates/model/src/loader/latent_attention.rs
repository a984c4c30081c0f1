//! Loads multi-head latent attention. Files have the maps from latents to keys and values in one matrix, as they were
//! trained, or one matrix for each head, those of keys already transposed.

use std::ops::Range;

use pellucid_tensor::{DType, HostWeight, Linear, SharedBytes, quant};

use super::tensor_finder::{ModulePath, transpose};
use super::{Loader, slice_rows};
use crate::Error;
use crate::config::LatentAttention;
use crate::ranks::{Columns, WeightRows};
use crate::weights::LatentAttentionWeights;

/// Returns the rows of the parts that are not rotated, and of those that are, in a matrix of queries.
fn query_rows(num_heads: usize, latent: LatentAttention) -> [Vec<usize>; 2] {
    [0..latent.plain_size, latent.plain_size..latent.key_size()].map(|part| {
        let of_head = |head: usize| part.clone().map(move |row| head * latent.key_size() + row);
        (0..num_heads).flat_map(of_head).collect()
    })
}

/// Returns the rows that compute a head's key and those that compute its value, in the matrix of both for all heads.
pub(crate) fn key_value_rows(latent: LatentAttention, head: usize) -> [Range<usize>; 2] {
    let LatentAttention { plain_size, value_size, .. } = latent;
    let start = head * (plain_size + value_size);
    [start..start + plain_size, start + plain_size..start + plain_size + value_size]
}

impl Loader<'_> {
    pub(super) fn latent_attention(&mut self, layer: usize) -> Result<LatentAttentionWeights, Error> {
        let (config, names) = (&self.blueprint.config, &self.blueprint.names);
        let (hidden, num_heads, sharing) = (config.hidden_size, config.num_heads, self.sharing);
        let latent = config.latent_attention.expect("checked with the configuration");
        let path = |template: &'static str| ModulePath::new(template, layer);
        let query_rank = match latent.query_rank {
            None => None,
            Some(rank) => {
                let down = self.linear(path(names.query_down), rank, hidden)?;
                Some((down, self.norm(path(names.query_down_norm), rank)?))
            }
        };
        let (query, width) = match latent.query_rank {
            None => (names.query, hidden),
            Some(rank) => (names.query_up, rank),
        };
        let rows = [latent.plain_size, latent.rotary_size].map(|size| sharing.head_rows(size));
        let [plain_query, rotary_query] = self.parts(path(query), rows, || query_rows(num_heads, latent), width)?;
        // Small, and every rank stores the whole row.
        let rows = [latent.latent_size, latent.rotary_size].map(WeightRows::from);
        let [latent_map, rotary_key] = self.fused(path(names.latent), rows, hidden)?;
        let (key_maps, value_maps) = if self.finder.exists(path(names.latent_up)) {
            self.joint_head_maps(path(names.latent_up), latent)?
        } else {
            let keys = [num_heads, latent.latent_size, latent.plain_size];
            let values = [num_heads, latent.value_size, latent.latent_size];
            (self.head_maps(path(names.latent_key_up), keys)?, self.head_maps(path(names.latent_value_up), values)?)
        };
        Ok(LatentAttentionWeights {
            query_rank,
            plain_query,
            rotary_query,
            latent: latent_map,
            rotary_key,
            latent_norm: self.norm(path(names.latent_norm), latent.latent_size)?,
            key_maps,
            value_maps,
            output: self.linear(
                path(names.attention_output),
                sharing.rows(Columns::Hidden),
                num_heads * latent.value_size,
            )?,
        })
    }

    /// Loads the matrices of this rank's heads from a tensor of one for each head.
    fn head_maps(&mut self, path: ModulePath, [heads, rows, cols]: [usize; 3]) -> Result<Vec<Linear>, Error> {
        let tensor = self.finder.shaped(&self.finder.name(path, "weight"), &[heads, rows, cols])?;
        let whole = HostWeight { dtype: tensor.info.dtype, rows: heads * rows, cols, bytes: tensor.bytes() };
        let map = |head: usize| {
            let of_head = head * rows..(head + 1) * rows;
            self.map(slice_rows(&whole, &[of_head]))
        };
        self.sharing.heads().map(map).collect()
    }

    /// Loads the maps of each head of this rank from the matrix of all. A quantized matrix is decoded before that of a
    /// key is transposed, because its blocks are of rows.
    fn joint_head_maps(
        &mut self,
        path: ModulePath,
        latent: LatentAttention,
    ) -> Result<(Vec<Linear>, Vec<Linear>), Error> {
        let LatentAttention { latent_size, plain_size, value_size, .. } = latent;
        let num_heads = self.blueprint.config.num_heads;
        let name = self.finder.name(path, "weight");
        let whole = self.host(&name, num_heads * (plain_size + value_size), latent_size)?;
        let dtype = whole.dtype;
        let maps = |head: usize| {
            let [key, value] = key_value_rows(latent, head).map(|rows| slice_rows(&whole, &[rows]));
            let (key_dtype, key) =
                if dtype.is_quantized() { (DType::F32, decoded(dtype, &key.bytes)) } else { (dtype, key.bytes) };
            let key = transpose(&key, key_dtype, latent_size, plain_size);
            let key = HostWeight { dtype: key_dtype, rows: latent_size, cols: plain_size, bytes: key };
            Ok((self.map(key)?, self.map(value)?))
        };
        self.sharing.heads().map(maps).collect()
    }

    fn map(&self, weight: HostWeight) -> Result<Linear, Error> {
        Ok(Linear { weight: self.backend.linear_weight(weight)?, bias: None })
    }
}

fn decoded(dtype: DType, bytes: &SharedBytes) -> SharedBytes {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    quant::decode(dtype, bytes, &mut values);
    values.iter().flat_map(|value: &f32| value.to_le_bytes()).collect::<Vec<u8>>().into()
}
