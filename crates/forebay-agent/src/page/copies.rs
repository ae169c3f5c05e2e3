//! Copies of what is on this node's drive, on others, where there are to be any.

use forebay_tier::status::CopyNode;

use super::View;
use super::html::Html;
use crate::words;

pub(super) fn section(html: &mut Html, view: &View<'_>) {
    let Some(copies) = &view.status.copies else { return };
    html.constant("<section aria-labelledby=\"nodes\"><h2 id=\"nodes\">On other nodes</h2>");
    for line in words::copies(copies) {
        html.element("p", &[("class", &"who")], line);
    }
    html.constant("<ul class=\"errors\">");
    for node in &copies.nodes {
        one(html, node);
    }
    html.close("ul");
    html.close("section");
}

fn one(html: &mut Html, node: &CopyNode) {
    html.open("li", &[]);
    html.open("p", &[]).element("strong", &[], &node.host).text(" ").text(&node.url);
    html.close("p");
    let mut parts = vec![if node.is_alive { "alive" } else { "not heard of" }.to_owned()];
    parts.extend(node.error.clone());
    html.element("p", &[("class", &"who")], parts.join(" · ")).close("li");
}
