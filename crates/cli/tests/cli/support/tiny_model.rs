//! The tiny model of the tests, in a home.

use super::Home;

pub(crate) const TEMPLATE: &str = pellucid_testing::TINY_TEMPLATE;

/// Writes the tiny model into a home folder and returns its path.
pub(crate) fn tiny_model(home: &Home, template: Option<&str>) -> String {
    let folder = home.path().join("model");
    pellucid_testing::tiny_model(&folder, template);
    folder.to_str().unwrap().to_owned()
}
