//! Maps the tensors of latent attention. A file has the maps to keys and to values apart, with a matrix for each head,
//! and those to keys transposed.

use super::recipe::TensorRecipe;
use super::tensor_map::TensorMapper;
use crate::Error;
use crate::architectures::Blueprint;
use crate::config::LatentAttention;
use crate::loader::latent_attention::key_value_rows;
use crate::loader::tensor_finder::ModulePath;

impl TensorMapper<'_> {
    pub(super) fn latent_attention(&mut self, layer: usize, latent: LatentAttention) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, hidden, num_heads) = (self.target, config.hidden_size, config.num_heads);
        let queries = num_heads * latent.key_size();
        match latent.query_rank {
            None => self.linear((names.query, to.query), layer, queries, hidden)?,
            Some(rank) => {
                self.linear((names.query_down, to.query_down), layer, rank, hidden)?;
                self.norm((names.query_down_norm, to.query_down_norm), layer, rank)?;
                self.linear((names.query_up, to.query_up), layer, queries, rank)?;
            }
        }
        self.linear((names.latent, to.latent), layer, latent.row_size(), hidden)?;
        self.norm((names.latent_norm, to.latent_norm), layer, latent.latent_size)?;
        self.head_maps(layer, latent)?;
        self.linear((names.attention_output, to.attention_output), layer, hidden, num_heads * latent.value_size)
    }

    fn head_maps(&mut self, layer: usize, latent: LatentAttention) -> Result<(), Error> {
        let LatentAttention { latent_size, plain_size, value_size, .. } = latent;
        let num_heads = self.source.config.num_heads;
        let name = self.finder.name(ModulePath::new(self.source.names.latent_up, layer), "weight");
        let dtype = self.finder.shaped(&name, &[num_heads * (plain_size + value_size), latent_size])?.info.dtype;
        if dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "an unquantized format, because a part of the matrix is transposed".into(),
                found: dtype.to_string(),
            });
        }
        let rows = |part: usize| (0..num_heads).flat_map(|head| key_value_rows(latent, head)[part].clone()).collect();
        let [key, value] = [self.target.latent_key_up, self.target.latent_value_up]
            .map(|to| ModulePath::new(to, layer).name("weight"));
        let keys = TensorRecipe::TransposedHeads { name: name.clone(), rows: rows(0), num_heads };
        self.push(key, dtype, &[num_heads, latent_size, plain_size], keys);
        let values = TensorRecipe::Gathered { name, rows: rows(1) };
        self.push(value, dtype, &[num_heads, value_size, latent_size], values);
        Ok(())
    }
}
