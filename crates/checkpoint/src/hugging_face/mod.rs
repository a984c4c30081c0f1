//! A Hugging Face folder: `config.json` and other JSON files, and weights as safetensors.
//!
//! Files of a download cache are symbolic links, which are followed. Names that come from a file (the shards of an
//! index) must be file names without a path.

mod json;
pub(crate) mod quantized;
mod safetensors;

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{Contents, Source};
use crate::error::{Error, quote};
use crate::file_bytes::FileReader;
use crate::pickle;
use safetensors::StoredTensor;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Limits in bytes, at least ten times the largest real files: a tokenizer.json of 262,144 tokens takes 33 MB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_TOKENIZER_BYTES: u64 = 1 << 30;
const MAX_INDEX_BYTES: u64 = 256 << 20;
const MAX_TEMPLATE_BYTES: u64 = 4 << 20;

/// The JSON and text files of a model folder.
#[derive(Debug, Clone, Default)]
pub struct HuggingFace {
    pub config: Value,
    pub generation_config: Option<Value>,
    /// The text of `tokenizer.json`, for the tokenizer to parse.
    pub tokenizer: Option<String>,
    pub tokenizer_config: Option<Value>,
    /// The text of `chat_template.jinja`, or else the (default) template of `tokenizer_config.json`.
    pub chat_template: Option<String>,
    /// `1_Pooling/config.json` of sentence-transformers: how the rows of a text become one vector.
    pub pooling_config: Option<Value>,
    /// `sentence_bert_config.json` of sentence-transformers: the maximum length of a text.
    pub sentence_config: Option<Value>,
}

impl HuggingFace {
    /// Returns `model_type` of `config.json`.
    pub fn model_type(&self) -> Result<&str, Error> {
        match self.config.get("model_type") {
            Some(Value::String(name)) => Ok(name),
            None => Err(Error::MissingKey { key: "\"model_type\" in config.json".into() }),
            Some(other) => Err(Error::KeyType {
                key: "\"model_type\" in config.json".into(),
                expected: "a string",
                found: json::kind(other).into(),
            }),
        }
    }
}

/// Returns the folder of a file.
pub(crate) fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

pub(crate) fn read_folder(folder: &Path, reader: &mut FileReader<'_>) -> Result<Contents, Error> {
    read(folder, None, reader)
}

/// Reads the folder of a weight file. A file that is not one of the folder's standard weight files replaces them.
pub(crate) fn read_weights_file(file: &Path, reader: &mut FileReader<'_>) -> Result<Contents, Error> {
    read(folder_of(file), Some(file), reader)
}

fn read(folder: &Path, given: Option<&Path>, reader: &mut FileReader<'_>) -> Result<Contents, Error> {
    let source = read_description(folder, reader)?;
    let mut weights = weight_files(folder, given.is_some(), reader)?;
    if let Some(given) = given
        && !weights.files.iter().any(|file| file.file_name() == given.file_name())
    {
        weights = WeightFiles { files: vec![given.to_path_buf()], index: None };
    }
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    for file in &weights.files {
        let shard = safetensors::read(file, reader)?;
        files.push((file.clone(), shard.file_bytes));
        tensors.extend(shard.tensors);
    }
    if let Some(index) = weights.index {
        index.check(&tensors)?;
    }
    let quantized::Tensors { tensors, notes } = quantized::tensors(&folder.join(CONFIG), &source.config, tensors)?;
    Ok(Contents { source: Source::HuggingFace(source), tensors, files, notes })
}

/// Returns the GGUF files of a folder, in the order of their names.
fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")).collect();
    files.sort();
    files
}

fn read_description(folder: &Path, reader: &FileReader<'_>) -> Result<HuggingFace, Error> {
    let config_path = folder.join(CONFIG);
    let config = json::read_optional(&config_path, MAX_CONFIG_BYTES, reader)?.ok_or_else(|| Error::MissingFile {
        path: config_path.clone(),
        needed_by: match gguf_files(folder).as_slice() {
            [] => "a Hugging Face folder has a config.json beside its weights".into(),
            files => format!("the folder contains GGUF files; give the path of one, such as {}", files[0].display()),
        },
    })?;
    if !config.is_object() {
        return Err(Error::invalid(&config_path, "the configuration", "a JSON object", json::kind(&config)));
    }
    let tokenizer_config_path = folder.join("tokenizer_config.json");
    let tokenizer_config = json::read_optional(&tokenizer_config_path, MAX_CONFIG_BYTES, reader)?;
    let chat_template = match json::read_text(&folder.join("chat_template.jinja"), MAX_TEMPLATE_BYTES, reader)? {
        Some(template) => Some(template),
        None => match &tokenizer_config {
            Some(config) => embedded_template(config, &tokenizer_config_path)?,
            None => None,
        },
    };
    Ok(HuggingFace {
        config,
        generation_config: json::read_optional(&folder.join("generation_config.json"), MAX_CONFIG_BYTES, reader)?,
        tokenizer: json::read_text(&folder.join("tokenizer.json"), MAX_TOKENIZER_BYTES, reader)?,
        tokenizer_config,
        chat_template,
        pooling_config: json::read_optional(&folder.join("1_Pooling/config.json"), MAX_CONFIG_BYTES, reader)?,
        sentence_config: json::read_optional(&folder.join("sentence_bert_config.json"), MAX_CONFIG_BYTES, reader)?,
    })
}

/// Returns `chat_template` of a tokenizer_config.json: a template, or the one named "default" in a list of named
/// templates.
fn embedded_template(config: &Value, path: &Path) -> Result<Option<String>, Error> {
    let wrong = |found: &Value| {
        let expected = "a string, or a list of objects with the strings \"name\" and \"template\"";
        Error::invalid(path, "key \"chat_template\"", expected, json::kind(found))
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(template)) => Ok(Some(template.clone())),
        Some(Value::Array(templates)) => {
            let mut default = None;
            for entry in templates {
                let text = |key| entry.get(key).and_then(Value::as_str);
                let (Some(name), Some(template)) = (text("name"), text("template")) else { return Err(wrong(entry)) };
                if name == "default" {
                    default.get_or_insert(template);
                }
            }
            Ok(default.map(str::to_owned))
        }
        Some(other) => Err(wrong(other)),
    }
}

/// The weight files of a folder, and the index that lists them if there are several.
struct WeightFiles {
    files: Vec<PathBuf>,
    index: Option<ShardIndex>,
}

fn weight_files(folder: &Path, given: bool, reader: &FileReader<'_>) -> Result<WeightFiles, Error> {
    let single = folder.join(SINGLE);
    let index = folder.join(INDEX);
    if single.exists() {
        return Ok(WeightFiles { files: vec![single], index: None });
    }
    if index.exists() {
        return ShardIndex::read(folder, index, reader);
    }
    if given {
        return Ok(WeightFiles { files: Vec::new(), index: None });
    }
    for name in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        let path = folder.join(name);
        if path.exists() {
            return Err(pickle::refuse(&path, "by its file name"));
        }
    }
    let needed_by = format!("a Hugging Face folder has its weights there, or in shards that {INDEX} names");
    Err(Error::MissingFile { path: single, needed_by })
}

/// `model.safetensors.index.json`: which shard holds which tensor.
struct ShardIndex {
    path: PathBuf,
    /// The file name of each tensor's shard, in the order of the index.
    weight_map: serde_json::Map<String, Value>,
}

impl ShardIndex {
    fn read(folder: &Path, path: PathBuf, reader: &FileReader<'_>) -> Result<WeightFiles, Error> {
        let Some(Value::Object(mut index)) = json::read_optional(&path, MAX_INDEX_BYTES, reader)? else {
            return Err(Error::invalid(&path, "the index", "a JSON object", "something else"));
        };
        let Some(Value::Object(weight_map)) = index.remove("weight_map") else {
            return Err(Error::invalid(&path, "key \"weight_map\"", "an object of tensor and file names", "none"));
        };
        let mut names = std::collections::BTreeSet::new();
        for (tensor, file) in &weight_map {
            let what = || format!("the shard of tensor {}", quote(tensor));
            let Value::String(name) = file else {
                return Err(Error::invalid(&path, what(), "a file name", json::kind(file)));
            };
            if !is_plain_name(name) {
                return Err(Error::invalid(&path, what(), "a plain *.safetensors file name", quote(name)));
            }
            names.insert(name.as_str());
        }
        let files: Vec<PathBuf> = names.into_iter().map(|name| folder.join(name)).collect();
        for file in &files {
            if !file.exists() {
                return Err(Error::MissingFile { path: file.clone(), needed_by: format!("{INDEX} names this shard") });
            }
        }
        Ok(WeightFiles { files, index: Some(ShardIndex { path, weight_map }) })
    }

    /// Checks that every tensor of the index is in some shard. Otherwise the index is out of date, or a shard is
    /// truncated.
    fn check(&self, tensors: &[StoredTensor]) -> Result<(), Error> {
        let found: std::collections::HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        match self.weight_map.keys().find(|name| !found.contains(name.as_str())) {
            None => Ok(()),
            Some(missing) => {
                let what = format!("tensor {}", quote(missing));
                Err(Error::invalid(&self.path, what, "a tensor in one of the shards that the index names", "none"))
            }
        }
    }
}

/// Whether a name is a safetensors file name without a path, on every operating system.
fn is_plain_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}
