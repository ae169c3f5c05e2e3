//! HTML that cannot be broken out of: names of elements and attributes are constants of this program, everything else
//! is escaped here, and there is no way around it.

use std::fmt::Display;

use forebay_format::harmless;

use super::text::cut;

/// A piece of HTML that grows.
pub(super) struct Html(String);

/// Attributes: constant names, values of any kind.
pub(super) type Attributes<'a> = &'a [(&'static str, &'a dyn Display)];

impl Html {
    pub(super) fn new() -> Self {
        Self(String::with_capacity(16 << 10))
    }

    /// `<tag ...>`
    pub(super) fn open(&mut self, tag: &'static str, attributes: Attributes<'_>) -> &mut Self {
        self.0.push('<');
        self.0.push_str(tag);
        for (name, value) in attributes {
            self.0.push(' ');
            self.0.push_str(name);
            self.0.push_str("=\"");
            self.escaped(&value.to_string());
            self.0.push('"');
        }
        self.0.push('>');
        self
    }

    /// `</tag>`
    pub(super) fn close(&mut self, tag: &'static str) -> &mut Self {
        self.0.push_str("</");
        self.0.push_str(tag);
        self.0.push('>');
        self
    }

    /// Text.
    pub(super) fn text(&mut self, text: impl Display) -> &mut Self {
        self.escaped(&cut(&text.to_string()));
        self
    }

    /// `<tag ...>text</tag>`
    pub(super) fn element(
        &mut self,
        tag: &'static str,
        attributes: Attributes<'_>,
        text: impl Display,
    ) -> &mut Self {
        self.open(tag, attributes).text(text).close(tag)
    }

    /// A constant of this program.
    pub(super) fn constant(&mut self, html: &'static str) -> &mut Self {
        self.0.push_str(html);
        self
    }

    pub(super) fn finish(self) -> String {
        self.0
    }

    fn escaped(&mut self, text: &str) {
        for c in harmless(text).chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                c => self.0.push(c),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_text_or_attributes() {
        let mut html = Html::new();
        html.element("p", &[("title", &"\" onload='x' &lt;")], "</p><b>&amp;");
        let expected = "<p title=\"&quot; onload=&#39;x&#39; &amp;lt;\">\
                        &lt;/p&gt;&lt;b&gt;&amp;amp;</p>";
        assert_eq!(html.finish(), expected);
    }
}
