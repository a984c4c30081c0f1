//! Writers of small model files. A test can set each field to a wrong value.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pellucid_checkpoint::{Array, Checkpoint, Error, Value};
use pellucid_tensor::DType;
use tempfile::TempDir;

/// The pieces of a GGUF file. Fields that are `None` get their correct value.
#[derive(Debug, Clone)]
pub(crate) struct Gguf {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) num_tensors: Option<u64>,
    pub(crate) num_keys: Option<u64>,
    pub(crate) keys: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: Vec<u8>,
    /// In the order of the file: the contiguous dimension first.
    pub(crate) dims: Vec<u64>,
    pub(crate) num_dims: Option<u32>,
    pub(crate) kind: u32,
    pub(crate) offset: Option<u64>,
    pub(crate) data: Vec<u8>,
}

/// Returns the formats that GGUF files have.
pub(crate) fn gguf_types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|&dtype| dtype != DType::F8_E4M3)
}

/// Returns the GGUF type number of a format. This repeats the reader's table on purpose.
pub(crate) fn kind_of(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 30,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2_K => 10,
        DType::Q3_K => 11,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::IQ4_NL => 20,
        DType::IQ4_XS => 23,
        DType::MXFP4 => 39,
        DType::NVFP4 => 40,
        DType::IQ1_S => 19,
        DType::IQ1_M => 29,
        DType::IQ2_XXS => 16,
        DType::IQ2_XS => 17,
        DType::IQ2_S => 22,
        DType::IQ3_XXS => 18,
        DType::IQ3_S => 21,
        DType::TQ1_0 => 34,
        DType::TQ2_0 => 35,
        DType::F8_E4M3 => panic!("GGUF has no F8_E4M3"),
    }
}

impl Tensor {
    pub(crate) fn new(name: &str, dtype: DType, dims: &[u64], data: Vec<u8>) -> Tensor {
        let name = name.as_bytes().to_vec();
        Tensor { name, dims: dims.to_vec(), num_dims: None, kind: kind_of(dtype), offset: None, data }
    }

    /// A tensor of the correct length, filled with a pattern.
    pub(crate) fn filled(name: &str, dtype: DType, dims: &[u64]) -> Tensor {
        let len = dims.iter().product::<u64>() as usize;
        let bytes = dtype.bytes_for(len).expect("whole blocks");
        Tensor::new(name, dtype, dims, (0..bytes).map(|i| i as u8).collect())
    }
}

impl Gguf {
    pub(crate) fn empty() -> Gguf {
        let (keys, tensors) = (Vec::new(), Vec::new());
        Gguf { magic: *b"GGUF", version: 3, num_tensors: None, num_keys: None, keys, tensors, alignment: 32 }
    }

    /// A valid file with every kind of section: scalars, a string, arrays of numbers and strings, two tensors.
    pub(crate) fn small() -> Gguf {
        Gguf::empty()
            .key("general.architecture", &Value::String("llama".into()))
            .key("llama.block_count", &Value::U32(2))
            .key("tokenizer.ggml.scores", &Value::Array(Array::F32(vec![0.5, -1.0])))
            .key("tokenizer.ggml.tokens", &Value::Array(Array::Strings(["<s>", "a", ""].into_iter().collect())))
            .tensor(Tensor::filled("token_embd.weight", DType::Q4_0, &[32, 3]))
            .tensor(Tensor::filled("output_norm.weight", DType::F32, &[5]))
    }

    pub(crate) fn key(self, key: &str, value: &Value) -> Gguf {
        let mut bytes = Vec::new();
        put_value(&mut bytes, value);
        self.raw_key(key.as_bytes(), bytes)
    }

    /// Adds a key whose type and value are these bytes.
    pub(crate) fn raw_key(mut self, key: &[u8], value: Vec<u8>) -> Gguf {
        self.keys.push((key.to_vec(), value));
        self
    }

    pub(crate) fn tensor(mut self, tensor: Tensor) -> Gguf {
        self.tensors.push(tensor);
        self
    }

    pub(crate) fn aligned(mut self, alignment: u32) -> Gguf {
        self.alignment = alignment as usize;
        self.key("general.alignment", &Value::U32(alignment))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.num_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.num_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_string(&mut out, key);
            out.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            put_string(&mut out, &tensor.name);
            out.extend(tensor.num_dims.unwrap_or(tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !data.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out.extend(data);
        out
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, Error> {
        open_gguf(&self.bytes())
    }

    /// Asserts that opening fails, and quickly; returns the message.
    #[track_caller]
    pub(crate) fn error(&self) -> String {
        gguf_error(&self.bytes())
    }
}

pub(crate) fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string);
}

/// Writes a type number and a value.
pub(crate) fn put_value(out: &mut Vec<u8>, value: &Value) {
    let mut put = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => put(0, &v.to_le_bytes()),
        Value::I8(v) => put(1, &v.to_le_bytes()),
        Value::U16(v) => put(2, &v.to_le_bytes()),
        Value::I16(v) => put(3, &v.to_le_bytes()),
        Value::U32(v) => put(4, &v.to_le_bytes()),
        Value::I32(v) => put(5, &v.to_le_bytes()),
        Value::F32(v) => put(6, &v.to_le_bytes()),
        Value::Bool(v) => put(7, &[u8::from(*v)]),
        Value::String(v) => {
            put(8, &[]);
            put_string(out, v.as_bytes());
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(out, array);
        }
        Value::U64(v) => put(10, &v.to_le_bytes()),
        Value::I64(v) => put(11, &v.to_le_bytes()),
        Value::F64(v) => put(12, &v.to_le_bytes()),
    }
}

/// Writes an array: element type, length and elements.
fn put_array(out: &mut Vec<u8>, array: &Array) {
    let mut start = |kind: u32| {
        out.extend(kind.to_le_bytes());
        out.extend((array.len() as u64).to_le_bytes());
    };
    match array {
        Array::U8(v) => (start(0), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::I8(v) => (start(1), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::U16(v) => (start(2), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::I16(v) => (start(3), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::U32(v) => (start(4), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::I32(v) => (start(5), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::F32(v) => (start(6), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::Bool(v) => (start(7), v.iter().for_each(|&x| out.push(u8::from(x)))).1,
        Array::Strings(v) => (start(8), v.iter().for_each(|x| put_string(out, x.as_bytes()))).1,
        Array::Arrays(v) => (start(9), v.iter().for_each(|x| put_array(out, x))).1,
        Array::U64(v) => (start(10), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::I64(v) => (start(11), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
        Array::F64(v) => (start(12), v.iter().for_each(|x| out.extend(x.to_le_bytes()))).1,
    }
}

/// Writes bytes to a file of this name and opens it.
pub(crate) fn open_as(name: &str, bytes: &[u8]) -> Result<Checkpoint, Error> {
    let folder = Folder::empty();
    folder.put(name, bytes);
    Checkpoint::open(&folder.path().join(name))
}

pub(crate) fn open_gguf(bytes: &[u8]) -> Result<Checkpoint, Error> {
    open_as("model.gguf", bytes)
}

#[track_caller]
pub(crate) fn gguf_error(bytes: &[u8]) -> String {
    let folder = Folder::empty();
    let message = quick_error(&folder.put("model.gguf", bytes));
    assert!(message.contains("model.gguf") || message.contains("key \""), "names the file or the key: {message}");
    message
}

/// Asserts that opening fails within 100 ms, and returns the message. The best of three attempts counts, because a busy
/// machine may interrupt one of them.
#[track_caller]
pub(crate) fn quick_error(path: &Path) -> String {
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        let message = Checkpoint::open(path).expect_err("the model is damaged").to_string();
        best = best.min(start.elapsed());
        if best < Duration::from_millis(100) {
            return message;
        }
    }
    panic!("{best:?} to refuse {}", path.display());
}

/// A folder that is deleted at the end of the test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn empty() -> Folder {
        Folder(tempfile::tempdir().expect("a folder for the test"))
    }

    /// A valid model: config.json and one safetensors file.
    pub(crate) fn hugging_face() -> Folder {
        let folder = Folder::empty();
        folder.put("config.json", br#"{"model_type": "llama", "hidden_size": 4}"#);
        folder.put("model.safetensors", &small_safetensors());
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, bytes).expect("write the test's file");
        path
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.path().join(name)).expect("remove the test's file");
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, Error> {
        Checkpoint::open(self.path())
    }

    #[track_caller]
    pub(crate) fn error(&self) -> String {
        self.open().expect_err("the folder is damaged").to_string()
    }
}

/// Returns a safetensors file of this header and data.
pub(crate) fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_string(&mut out, header.as_bytes());
    out.extend(data);
    out
}

pub(crate) const SMALL_HEADER: &str = r#"{"__metadata__":{"format":"pt"},
    "b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},
    "a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;

/// Two tensors, "a" before "b" in the data and after it in the header.
pub(crate) fn small_safetensors() -> Vec<u8> {
    safetensors(SMALL_HEADER, &(0..22).collect::<Vec<u8>>())
}
