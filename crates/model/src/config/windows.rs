//! Which layers need the keys and values of the last positions alone, because all layers that read them have sliding
//! windows. Their memory can be given back while a sequence goes on.

use super::DecoderConfig;

impl DecoderConfig {
    /// Returns the number of positions, its own included, that a row needs of layers whose old blocks can be given
    /// back: the longest window. `None` if there is no such layer, or if the blocks of all layers have to stay.
    pub fn kv_window(&self) -> Option<usize> {
        // These read positions by block tables of their own, or have memory that goes with the blocks.
        let keeps_all =
            self.latent_attention.is_some() || self.predictor.is_some() || self.has_state() || self.num_ranks > 1;
        let stored = || (0..self.num_layers()).filter(|&layer| self.layers[layer].has_kv());
        // Without a layer that keeps all blocks, the number of blocks would not say how long a sequence may be.
        if keeps_all || !stored().any(|layer| !self.is_windowed(layer)) {
            return None;
        }
        stored().filter(|&layer| self.is_windowed(layer)).filter_map(|layer| self.longest_window(layer)).max()
    }

    /// Whether only rows within windows read the keys and values that a layer stores.
    pub fn is_windowed(&self, layer: usize) -> bool {
        self.longest_window(layer).is_some_and(|window| window < self.context_len)
    }

    /// Returns the longest window of the layers that read the keys and values of a layer; `None` if one of them has no
    /// window.
    fn longest_window(&self, layer: usize) -> Option<usize> {
        let readers = self.layers.iter().enumerate().filter(|(i, reader)| reader.kv_from.unwrap_or(*i) == layer);
        readers.map(|(_, reader)| reader.window).try_fold(0, |longest, window| Some(longest.max(window?)))
    }
}

#[cfg(test)]
mod tests {
    use crate::{DecoderConfig, LayerConfig};

    fn config(layers: Vec<LayerConfig>) -> DecoderConfig {
        DecoderConfig { context_len: 100, layers, ..DecoderConfig::EMPTY }
    }

    #[test]
    fn the_longest_window_of_those_that_read_a_layer_counts() {
        let (plain, window) = (LayerConfig::PLAIN, |window| LayerConfig { window: Some(window), ..LayerConfig::PLAIN });
        let reads = |layer: LayerConfig, from| LayerConfig { kv_from: Some(from), ..layer };
        let found = |layers| config(layers).kv_window();
        assert_eq!(found(vec![plain, window(8), window(16)]), Some(16));
        assert_eq!(found(vec![plain, window(8), reads(window(24), 1)]), Some(24));
        assert_eq!(found(vec![plain, window(8), reads(plain, 1)]), None, "one of them attends to all positions");
        assert_eq!(found(vec![plain, window(100)]), None, "a window as long as the context");
        assert_eq!(found(vec![window(8), window(8)]), None, "no layer keeps all blocks");
        assert_eq!(found(vec![plain, plain]), None);
    }
}
