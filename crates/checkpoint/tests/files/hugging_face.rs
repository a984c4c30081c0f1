//! Hugging Face folders that open.

use pellucid_checkpoint::{Checkpoint, HuggingFace, Source};
use pellucid_tensor::DType;

use crate::build::{Folder, safetensors};

fn described(checkpoint: &Checkpoint) -> &HuggingFace {
    match checkpoint.source() {
        Source::HuggingFace(folder) => folder,
        Source::Gguf(_) => panic!("a folder is not a GGUF file"),
    }
}

#[test]
fn a_folder_with_one_file() {
    let folder = Folder::hugging_face();
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.path(), folder.path());
    assert_eq!(checkpoint.architecture().unwrap(), "llama");
    assert_eq!(described(&checkpoint).config["hidden_size"], 4);
    assert!(described(&checkpoint).tokenizer.is_none());
    assert_eq!(checkpoint.files(), [folder.path().join("model.safetensors")]);

    let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b"], "in the order of the data");
    let a = checkpoint.tensor("a").unwrap();
    assert_eq!((a.info.dtype, a.info.shape.as_slice()), (DType::F32, [2, 2].as_slice()));
    assert_eq!(*a.bytes(), *(0..16).collect::<Vec<u8>>());
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!((b.info.dtype, b.info.shape.as_slice()), (DType::BF16, [3].as_slice()));
    assert_eq!(*b.bytes(), *(16..22).collect::<Vec<u8>>());
}

#[test]
fn a_file_of_the_folder_opens_the_folder() {
    let folder = Folder::hugging_face();
    folder.put("tokenizer.json", b"{}");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let checkpoint = Checkpoint::open(&folder.path().join(name)).unwrap();
        assert_eq!((checkpoint.architecture().unwrap(), checkpoint.tensors().len()), ("llama", 2), "{name}");
    }
}

#[test]
fn another_weight_file_replaces_the_standard_one() {
    let folder = Folder::hugging_face();
    let other = folder.put("other.safetensors", &safetensors("{}", &[]));
    assert!(Checkpoint::open(&other).unwrap().tensors().is_empty());
    folder.remove("model.safetensors");
    assert!(Checkpoint::open(&other).unwrap().tensors().is_empty());
}

#[test]
fn all_json_files_are_read() {
    let folder = Folder::hugging_face();
    folder.put("generation_config.json", br#"{"temperature": 0.5}"#);
    folder.put("tokenizer.json", br#"{"version": "1.0"}"#);
    folder.put("tokenizer_config.json", br#"{"bos_token": "<s>"}"#);
    let checkpoint = folder.open().unwrap();
    let described = described(&checkpoint);
    assert_eq!(described.generation_config.as_ref().unwrap()["temperature"], 0.5);
    assert_eq!(described.tokenizer.as_deref(), Some(r#"{"version": "1.0"}"#));
    assert_eq!(described.tokenizer_config.as_ref().unwrap()["bos_token"], "<s>");
    assert_eq!(checkpoint.chat_template(), None);
}

#[test]
fn the_chat_template_is_found_in_each_of_three_places() {
    let folder = Folder::hugging_face();
    let cases = [
        (r#"{"chat_template": null}"#, None),
        (r#"{"chat_template": "one"}"#, Some("one")),
        (
            r#"{"chat_template": [{"name": "tools", "template": "tools"}, {"name": "default", "template": "plain"}]}"#,
            Some("plain"),
        ),
        (r#"{"chat_template": [{"name": "rag", "template": "rag"}]}"#, None),
    ];
    for (config, expected) in cases {
        folder.put("tokenizer_config.json", config.as_bytes());
        assert_eq!(folder.open().unwrap().chat_template(), expected, "{config}");
    }
    folder.put("tokenizer_config.json", cases[1].0.as_bytes());
    folder.put("chat_template.jinja", b"own file");
    assert_eq!(folder.open().unwrap().chat_template(), Some("own file"));
}

/// A folder with two shards of one tensor each.
pub(crate) fn sharded() -> Folder {
    let folder = Folder::hugging_face();
    folder.remove("model.safetensors");
    let header = |name: &str| format!(r#"{{"{name}":{{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}}}"#);
    folder.put("model-00001-of-00002.safetensors", &safetensors(&header("first"), &[1, 2, 3, 4]));
    folder.put("model-00002-of-00002.safetensors", &safetensors(&header("second"), &[5, 6, 7, 8]));
    let index = r#"{"metadata": {"total_size": 8}, "weight_map": {
        "second": "model-00002-of-00002.safetensors",
        "first": "model-00001-of-00002.safetensors"}}"#;
    folder.put("model.safetensors.index.json", index.as_bytes());
    folder
}

#[test]
fn shards_are_found_by_the_index() {
    let folder = sharded();
    for path in [
        folder.path().to_path_buf(),
        folder.path().join("model.safetensors.index.json"),
        folder.path().join("model-00002-of-00002.safetensors"),
    ] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.files().len(), 2);
        assert_eq!(*checkpoint.tensor("first").unwrap().bytes(), [1, 2, 3, 4]);
        assert_eq!(*checkpoint.tensor("second").unwrap().bytes(), [5, 6, 7, 8]);
        let bytes: u64 = checkpoint.files().iter().map(|file| file.metadata().unwrap().len()).sum();
        assert_eq!(checkpoint.file_bytes(), bytes);
    }
}

/// A download cache stores files under their hashes, and folders of links to them.
#[cfg(unix)]
#[test]
fn links_are_followed() {
    let blobs = Folder::hugging_face();
    let snapshot = Folder::empty();
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(blobs.path().join(name), snapshot.path().join(name)).unwrap();
    }
    assert_eq!(snapshot.open().unwrap().tensors().len(), 2);
}

#[test]
fn scalars_and_padded_headers_are_allowed() {
    let folder = Folder::hugging_face();
    let header = r#"{"scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}          "#;
    folder.put("model.safetensors", &safetensors(header, &[0, 0, 128, 63]));
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.tensor("scalar").unwrap().info.num_elements(), 1);
}

/// Older folders of encoders hold the positions 0, 1, 2, ... as integers, which are no weights.
#[test]
fn cached_positions_are_left_out() {
    let folder = Folder::hugging_face();
    let header = r#"{"embeddings.position_ids":{"dtype":"I64","shape":[1,2],"data_offsets":[0,16]},
        "a":{"dtype":"F16","shape":[1],"data_offsets":[16,18]}}"#;
    folder.put("model.safetensors", &safetensors(header, &[0; 18]));
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.tensors().iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), ["a"]);
    folder.put("model.safetensors", &safetensors(&header.replace("[1,2]", "[1,3]"), &[0; 18]));
    assert!(folder.error().contains("24 bytes, by its type and shape"));
}
