//! Presets: options for a purpose, so that a user need not know them.
//!
//! A preset is a starting point: options that the user gives replace those of the preset, and the result is shown.

use std::fmt;
use std::str::FromStr;

use crate::{Error, SamplingParams};

/// Options for a purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preset {
    Code,
    Factual,
    Chat,
    Creative,
    Brainstorm,
}

impl Preset {
    pub const ALL: [Preset; 5] = [Preset::Code, Preset::Factual, Preset::Chat, Preset::Creative, Preset::Brainstorm];

    pub fn name(self) -> &'static str {
        match self {
            Preset::Code => "code",
            Preset::Factual => "factual",
            Preset::Chat => "chat",
            Preset::Creative => "creative",
            Preset::Brainstorm => "brainstorm",
        }
    }

    /// Returns the options of the preset; all others are neutral.
    pub fn params(self) -> SamplingParams {
        let neutral = SamplingParams::default();
        match self {
            // Code models are compared with this setting for a single attempt (pass@1): close to greedy, with the tail
            // cut. No repetition penalty, because programs repeat themselves for good reasons.
            Preset::Code => SamplingParams { temperature: 0.2, top_p: 0.95, ..neutral },
            // Benchmarks of knowledge decode greedily: where one answer is right, sampling can only miss it.
            Preset::Factual => SamplingParams { temperature: 0.0, ..neutral },
            // Close to the defaults of current chat models: temperature 0.6 to 0.7, top-p 0.8 to 0.9, and a top-k that
            // cuts the far tail. No penalty on repeats: DRY spoils the indentation of copied code, and the loop guard
            // ends the loops of small models.
            Preset::Chat => SamplingParams { temperature: 0.7, top_k: 40, top_p: 0.9, ..neutral },
            // The model's own spread, with the tail cut in proportion to how sure the model is: min-p keeps text
            // coherent at temperatures where top-p no longer does (Nguyen et al., "Turning up the heat", 2024).
            Preset::Creative => SamplingParams { temperature: 1.0, min_p: 0.05, presence_penalty: 0.3, ..neutral },
            // Hotter still, and half of the time XTC, with its author's values, excludes the obvious continuations.
            Preset::Brainstorm => SamplingParams {
                temperature: 1.3,
                min_p: 0.05,
                xtc_probability: 0.5,
                xtc_threshold: 0.1,
                presence_penalty: 0.6,
                ..neutral
            },
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Preset::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| Error::UnknownPreset {
            found: name.chars().take(40).collect(),
            expected: Preset::ALL.map(Preset::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_found_by_name() {
        for preset in Preset::ALL {
            assert_eq!(preset.params().check(), Ok(()), "{preset}");
            assert_eq!(preset.name().parse(), Ok(preset));
        }
        let refused = "poetry".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "preset: no preset is called \"poetry\"; expected code, factual, chat, creative, brainstorm"
        );
    }
}
