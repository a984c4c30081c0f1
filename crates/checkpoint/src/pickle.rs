//! Recognises Python pickles by name and by first bytes, so that they are refused with a reason instead of a parse
//! error.

use std::path::Path;

use crate::error::Error;

const EXTENSIONS: [&str; 5] = ["pt", "pth", "pkl", "pickle", "ckpt"];

/// Returns why a file of this name is taken for a pickle; `None` if it is not.
pub(crate) fn by_name(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let extension = Path::new(&name).extension().and_then(|e| e.to_str()).unwrap_or("");
    if EXTENSIONS.contains(&extension) {
        return Some("by its file extension");
    }
    let torch_weights = name.starts_with("pytorch_model") && (extension == "bin" || name.ends_with(".bin.index.json"));
    torch_weights.then_some("by its file name")
}

/// Returns why a file with these first bytes is taken for a pickle; `None` if it is not. Recognises PyTorch's zip
/// archives, and the PROTO opcode of pickle protocols 2 to 5.
pub(crate) fn by_magic(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [b'P', b'K', 3, 4, ..] => Some("a zip archive, the container that PyTorch wraps around a pickle"),
        [0x80, 2..=5, ..] => Some("by its first bytes"),
        _ => None,
    }
}

pub(crate) fn refuse(path: &Path, reason: &'static str) -> Error {
    Error::Pickle { path: path.to_path_buf(), reason }
}
