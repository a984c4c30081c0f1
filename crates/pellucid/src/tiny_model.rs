//! The model that the library contains, so that programs can be tried without a download.

/// The tiny model of this crate's examples, as a GGUF file: it writes stories for small children and nothing else.
///
/// 1.2 MB, trained on TinyStories, MIT. A program that does not use this constant does not contain it.
///
/// ```
/// use pellucid::{Pellucid, TINY_MODEL};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = std::env::temp_dir().join(format!("tiny-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// std::fs::write(folder.join("tiny.gguf"), TINY_MODEL)?;
/// let model = Pellucid::open(folder.join("tiny.gguf"))?;
/// # drop(model);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
pub const TINY_MODEL: &[u8] = include_bytes!("../models/tiny.gguf");
